"""Drives a running `larder serve` with OpenAI's own Python client.

    pip install openai pydantic
    larder serve -m STORE --parallel 1 --queue 1 --context 2048
    python scripts/check/test_serve.py --url http://127.0.0.1:8080

Checks chat, streaming, stop, seeds, log-probabilities, structured output, several answers, errors, cancellation, and 429 (which needs --parallel 1 --queue 1,
as above). Prints `ok` for each check; exits with 1 if one fails.
"""

import argparse
import json
import threading
import time
import urllib.request
from typing import Annotated, Literal

import openai
import pydantic


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key, max_retries=0, timeout=120)
    test = Test(client, args.url)
    for check in (test.models, test.chat, test.streaming, test.completions, test.stop, test.seeds, test.logprobs,
                  test.structured, test.several, test.errors, test.cancellation, test.too_many):
        check()
        print(f"ok {check.__name__}", flush=True)


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    mood: Literal["merry", "sad"]


class Test:
    def __init__(self, client, url):
        self.client, self.url = client, url
        self.model = client.models.list().data[0].id

    def chat_of(self, text="Tell me about the old house.", **more):
        more = {"max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}} | more
        return self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": text}], **more)

    def active(self):
        with urllib.request.urlopen(f"{self.url}/health") as response:
            return json.load(response)["active"]

    def models(self):
        assert self.client.models.retrieve(self.model).id == self.model

    def chat(self):
        answer = self.chat_of()
        assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length", answer
        assert answer.usage.completion_tokens == 16
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
        assert answer.timings["predicted_n"] == 16

    def streaming(self):
        whole = self.chat_of().choices[0].message.content
        chunks = list(self.chat_of(stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole, (text, whole)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 16 and not chunks[-1].choices

    def completions(self):
        ask = dict(model=self.model, prompt="It was", max_tokens=12, temperature=0, extra_body={"ignore_eos": True})
        whole = self.client.completions.create(**ask)
        streamed = "".join(chunk.choices[0].text for chunk in self.client.completions.create(stream=True, **ask))
        assert streamed == whole.choices[0].text and whole.usage.completion_tokens == 12

    def stop(self):
        whole = self.chat_of(max_tokens=32).choices[0].message.content
        stop = whole[len(whole) // 2:][:3]
        cut = self.chat_of(max_tokens=32, stop=[stop, "\u2603"])
        assert cut.choices[0].message.content == whole[:whole.index(stop)], (whole, stop, cut)
        assert cut.choices[0].finish_reason == "stop"

    def seeds(self):
        draw = lambda seed: self.chat_of(temperature=1.5, top_p=0.95, presence_penalty=0.5, seed=seed)
        one, two, other = (draw(seed).choices[0].message.content for seed in (1, 1, 2))
        assert one == two != other

    def logprobs(self):
        content = self.chat_of(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert content and all(len(token.top_logprobs) == 3 for token in content)
        for token in content:
            assert token.logprob <= 0 and token.logprob >= token.top_logprobs[0].logprob - 1e-6

    def structured(self):
        ask = dict(model=self.model, messages=[{"role": "user", "content": "Who lives in the old house?"}], max_tokens=200)
        for seed in range(5):
            answer = self.client.chat.completions.parse(response_format=Person, temperature=1.0, seed=seed, **ask)
            person = answer.choices[0].message.parsed
            assert isinstance(person, Person) and answer.choices[0].finish_reason == "stop", answer
        with self.client.chat.completions.stream(response_format=Person, seed=1, **ask) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
        any_object = self.client.chat.completions.create(response_format={"type": "json_object"}, seed=2, **ask)
        choice = any_object.choices[0]
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict), any_object

    def several(self):
        one = [self.chat_of(temperature=1.0, seed=seed).choices[0].message.content for seed in (5, 6)]
        # With a queue of one there may be no room until the answer before has left.
        patient = Test(self.client.with_options(max_retries=5), self.url)
        both = patient.chat_of(temperature=1.0, seed=5, n=2)
        assert [choice.message.content for choice in both.choices] == one, both
        assert both.usage.completion_tokens == 32

    def errors(self):
        messages = [{"role": "user", "content": "x"}]
        for error, call in (
            (openai.NotFoundError, lambda: self.client.chat.completions.create(model="x", messages=messages)),
            (openai.NotFoundError, lambda: self.client.models.retrieve("x")),
            (openai.BadRequestError, lambda: self.client.chat.completions.create(model=self.model, messages=[])),
            (openai.BadRequestError, lambda: self.chat_of(n=65)),
            (openai.BadRequestError, lambda: self.chat_of(response_format={"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "string", "not": {"const": "a"}}}}, extra_body={})),
            (openai.BadRequestError, lambda: self.chat_of(temperature=9)),
            (openai.BadRequestError, lambda: self.chat_of("house " * 100_000)),
            (openai.BadRequestError, lambda: self.client.embeddings.create(model=self.model, input="")),
        ):
            try:
                call()
            except error as got:
                assert got.body["message"], got
            else:
                raise AssertionError(f"no {error.__name__}")

    def cancellation(self):
        stream = self.chat_of(stream=True, max_tokens=1000)
        for _, _ in zip(range(5), stream):
            pass
        stream.close()
        start = time.monotonic()
        while self.active():
            assert time.monotonic() - start < 10, "the slot was not freed"
            time.sleep(0.02)

    def too_many(self):
        refused = []

        def ask():
            try:
                self.chat_of(max_tokens=64)
            except openai.RateLimitError as error:
                refused.append(error.response.headers["retry-after"])

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not refused:
            print("   (no request was refused: start the server with --parallel 1 --queue 1)")
        assert all(int(seconds) >= 1 for seconds in refused)
        patient = self.client.with_options(max_retries=5)
        assert patient.models.list().data


if __name__ == "__main__":
    main()
