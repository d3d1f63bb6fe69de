"""Drives a running `larder serve` with clients that are strict about details: LangChain's and LiteLLM's.

    pip install langchain-openai litellm
    larder serve
    python scripts/check/test_serve_peers.py --url http://127.0.0.1:8080

Checks answers, streams with usage, stop, log-probabilities, structured output, batches, async use and errors of the right class. Prints
`ok` for each check; exits with 1 if one fails.
"""

import argparse
import asyncio
import os
from typing import Annotated, Literal

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm  # noqa: E402
import openai  # noqa: E402
import pydantic  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage  # noqa: E402
from langchain_core.output_parsers import StrOutputParser  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402

litellm.suppress_debug_info = True
TOKENS = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    where = {"base_url": f"{args.url}/v1", "api_key": args.api_key}
    model = openai.OpenAI(**where).models.list().data[0].id
    chain, lite = LangChain(model, where), LiteLlm(model, where)
    for check in (chain.answers, chain.conversations, chain.streams, chain.batches, chain.chains, chain.logprobs,
                  chain.completions, chain.structured, chain.errors, lite.answers, lite.streams, lite.awaits, lite.completions, lite.errors):
        check()
        print(f"ok {check.__qualname__}", flush=True)


class Mood(pydantic.BaseModel):
    name: Literal["merry", "sad"]
    degree: Annotated[int, pydantic.Field(ge=0, le=10)]


class LangChain:
    def __init__(self, model, where):
        self.model, self.where = model, where
        self.chat = self.made()

    def made(self, **more):
        given = {"temperature": 0, "max_tokens": TOKENS, "max_retries": 0, "stream_usage": True,
                 "extra_body": {"ignore_eos": True}}
        return ChatOpenAI(model=self.model, **self.where, **(given | more))

    def answers(self):
        answer = self.chat.invoke("Tell me about the old house.")
        assert isinstance(answer, AIMessage) and answer.content
        assert answer.usage_metadata["output_tokens"] == TOKENS
        assert answer.response_metadata["finish_reason"] == "length"
        assert answer.response_metadata["model_name"] == self.model

    def conversations(self):
        messages = [SystemMessage("Answer briefly."), HumanMessage("Who lived there?"), AIMessage("A widow."),
                    HumanMessage([{"type": "text", "text": "And then?"}])]
        assert self.chat.invoke(messages).content

    def streams(self):
        whole = self.chat.invoke("It was").content
        chunks = list(self.chat.stream("It was"))
        assert len(chunks) > 2 and "".join(chunk.content for chunk in chunks) == whole
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert total.usage_metadata["output_tokens"] == TOKENS, total.usage_metadata

        async def streamed():
            return "".join([chunk.content async for chunk in self.chat.astream("It was")])

        assert asyncio.run(streamed()) == whole

    def batches(self):
        one, other = "The river", "The letter"
        together = [answer.content for answer in self.chat.batch([one, other, one])]
        assert together[0] == together[2] == self.chat.invoke(one).content
        assert together[1] == self.chat.invoke(other).content

    def chains(self):
        prompt = ChatPromptTemplate.from_messages([("system", "You tell of {place}."), ("human", "{question}")])
        chain = prompt | self.chat.bind(stop=["\u2603"]) | StrOutputParser()
        assert chain.invoke({"place": "the moor", "question": "What is there?"})

    def logprobs(self):
        answer = self.made(logprobs=True, top_logprobs=2).invoke("It was")
        content = answer.response_metadata["logprobs"]["content"]
        assert len(content) == TOKENS and all(len(token["top_logprobs"]) == 2 for token in content)

    def completions(self):
        given = {"temperature": 0, "max_tokens": TOKENS, "max_retries": 0, "extra_body": {"ignore_eos": True}}
        writer = OpenAI(model=self.model, **self.where, **given)
        whole = writer.invoke("It was")
        assert whole and "".join(writer.stream("It was")) == whole

    def structured(self):
        chat = self.made(temperature=1, seed=1, max_tokens=200, extra_body={})
        mood = chat.with_structured_output(Mood, method="json_schema").invoke("How is the widow?")
        assert isinstance(mood, Mood), mood

    def errors(self):
        refuses(openai.BadRequestError, lambda: self.made(n=65).invoke("x"))
        refuses(openai.BadRequestError, lambda: self.chat.invoke("house " * 100_000))
        refuses(openai.NotFoundError, lambda: ChatOpenAI(model="x", max_retries=0, **self.where).invoke("x"))


class LiteLlm:
    def __init__(self, model, where):
        self.given = {"model": f"openai/{model}", "temperature": 0, "max_tokens": TOKENS, "num_retries": 0,
                      "extra_body": {"ignore_eos": True}, **where}
        self.messages = [{"role": "user", "content": "Tell me about the old house."}]

    def answers(self):
        answer = litellm.completion(messages=self.messages, **self.given)
        assert answer.choices[0].message.content and answer.usage.completion_tokens == TOKENS
        self.whole = answer.choices[0].message.content

    def streams(self):
        chunks = list(litellm.completion(
            messages=self.messages, stream=True, stream_options={"include_usage": True}, **self.given))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == self.whole, (text, self.whole)
        assert litellm.stream_chunk_builder(chunks, messages=self.messages).usage.completion_tokens == TOKENS

    def awaits(self):
        async def both():
            ask = [litellm.acompletion(messages=self.messages, **self.given) for _ in range(3)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*ask)]

        assert asyncio.run(both()) == [self.whole] * 3

    def completions(self):
        given = self.given | {"model": self.given["model"].replace("openai/", "text-completion-openai/", 1)}
        assert litellm.text_completion(prompt="It was", **given).choices[0].text

    def errors(self):
        refuses(litellm.BadRequestError, lambda: litellm.completion(messages=self.messages, **(self.given | {"n": 65})))
        refuses(litellm.ContextWindowExceededError, lambda: litellm.completion(
            messages=[{"role": "user", "content": "house " * 100_000}], **self.given))
        refuses(litellm.NotFoundError, lambda: litellm.completion(
            messages=self.messages, **(self.given | {"model": "openai/x"})))


def refuses(error, call):
    try:
        call()
    except error as got:
        assert str(got)
    else:
        raise AssertionError(f"no {error.__name__}")


if __name__ == "__main__":
    main()
