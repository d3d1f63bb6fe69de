"""Drives a running `larder serve` with the official Python clients of OpenAI (Responses), Anthropic and Ollama.

    pip install openai anthropic ollama pydantic
    larder serve -m STORE --context 2048
    python scripts/check/test_apis.py --url http://127.0.0.1:8080

Checks whole and streamed answers, structured output, stop sequences, counts of tokens and errors. With --tools calls of tools instead, for
a model whose form of calls is known. Prints `ok` for each check; exits with 1 if one fails.
"""

import argparse
import json

import anthropic
import ollama
import openai
import pydantic

PROMPT = "Tell me about the old house."
SCHEMA = {"type": "object", "properties": {"room": {"enum": ["hall", "attic"]}}, "required": ["room"],
          "additionalProperties": False}


class Room(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    level: int = pydantic.Field(ge=0, le=9)
    is_dark: bool


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--tools", action="store_true", help="check calls of tools instead")
    args = parser.parse_args()
    test = Test(args.url, args.api_key)
    checks = [test.responses, test.responses_stream, test.responses_structured, test.responses_errors,
              test.messages, test.messages_stream, test.messages_stop, test.messages_structured, test.messages_errors,
              test.ollama_chat, test.ollama_generate, test.ollama_models, test.ollama_load, test.ollama_errors]
    if args.tools:
        checks = [test.responses_tools, test.messages_tools, test.ollama_tools]
    for check in checks:
        check()
        print(f"ok {check.__name__}", flush=True)


def raises(error, call):
    try:
        call()
    except error as got:
        return got
    raise AssertionError(f"no {error.__name__}")


class Test:
    def __init__(self, url, key):
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)
        self.ollama = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})
        self.model = self.openai.models.list().data[0].id
        answer = self.openai.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": PROMPT}], max_tokens=16, temperature=0)
        self.want = answer.choices[0].message.content
        self.tokens = answer.usage.prompt_tokens

    def respond(self, **more):
        more = {"input": PROMPT, "max_output_tokens": 16, "temperature": 0} | more
        return self.openai.responses.create(model=self.model, **more)

    def responses(self):
        answer = self.respond(metadata={"a": "b"})
        assert answer.output_text == self.want, (answer, self.want)
        assert answer.status in ("completed", "incomplete") and answer.metadata == {"a": "b"}
        assert answer.usage.input_tokens == self.tokens and answer.usage.input_tokens_details.cached_tokens > 0
        again = self.respond(input=[{"role": "user", "content": PROMPT}, *answer.output, {"role": "user", "content": "Go on."}])
        assert again.usage.input_tokens > answer.usage.total_tokens, again

    def responses_stream(self):
        events = list(self.respond(stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == self.want
        assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.output_text == self.want
        with self.openai.responses.stream(model=self.model, input=PROMPT, max_output_tokens=16, temperature=0) as stream:
            kinds = {event.type for event in stream}
        assert {"response.output_text.delta", "response.output_text.done", "response.output_item.done"} <= kinds, kinds

    def responses_structured(self):
        ask = dict(model=self.model, input="Which room?", text_format=Room, temperature=1.0, max_output_tokens=200)
        parsed = self.openai.responses.parse(**ask)
        assert isinstance(parsed.output_parsed, Room), parsed
        with self.openai.responses.stream(**ask) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_response().output_parsed, Room)

    def responses_errors(self):
        for more in ({"previous_response_id": "resp_1"}, {"background": True}, {"tools": [{"type": "web_search"}]},
                     {"input": []}):
            assert raises(openai.BadRequestError, lambda: self.respond(**more)).body["message"]
        raises(openai.NotFoundError, lambda: self.openai.responses.create(model="x", input="x"))

    def message_of(self, temperature=0, **more):
        more = {"max_tokens": 16, "messages": [{"role": "user", "content": PROMPT}]} | more
        return self.anthropic.messages.create(model=self.model, extra_body={"temperature": temperature}, **more)

    def messages(self):
        answer = self.message_of()
        assert answer.content[0].text == self.want and answer.stop_reason in ("max_tokens", "end_turn"), answer
        count = self.anthropic.messages.count_tokens(model=self.model, messages=[{"role": "user", "content": PROMPT}])
        assert count.input_tokens == self.tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        turns = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": answer.content},
                 {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
        again = self.message_of(messages=turns, system=[{"type": "text", "text": "Be brief."}])
        assert again.usage.input_tokens + again.usage.cache_read_input_tokens > self.tokens

    def messages_stream(self):
        ask = dict(model=self.model, max_tokens=16, messages=[{"role": "user", "content": PROMPT}],
                   extra_body={"temperature": 0})
        with self.anthropic.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == self.want
            final = stream.get_final_message()
        assert final.content[0].text == self.want and final.stop_reason in ("max_tokens", "end_turn"), final
        assert final.usage.output_tokens > 0 and final.usage.cache_read_input_tokens > 0
        kinds = [event.type for event in self.anthropic.messages.create(stream=True, **ask)]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds

    def messages_stop(self):
        stop = self.want[len(self.want) // 2:][:3]
        cut = self.message_of(stop_sequences=["\u2603", stop])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop), cut
        assert cut.content[0].text == self.want[:self.want.index(stop)]

    def messages_structured(self):
        answer = self.message_of(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=100)
        assert json.loads(answer.content[0].text)["room"] in ("hall", "attic"), answer

    def messages_errors(self):
        image = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]
        for more in ({"messages": []}, {"messages": [{"role": "user", "content": image}]}, {"temperature": 9},
                     {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}):
            error = raises(anthropic.BadRequestError, lambda: self.message_of(**more))
            assert error.body["error"]["type"] == "invalid_request_error", error.body
        user = [{"role": "user", "content": "x"}]
        raises(anthropic.NotFoundError, lambda: self.anthropic.messages.create(model="x", max_tokens=1, messages=user))

    def ollama_ask(self, **more):
        more = {"messages": [{"role": "user", "content": PROMPT}], "options": {"num_predict": 16, "temperature": 0}} | more
        return self.ollama.chat(model=more.pop("model", self.model), **more)

    def ollama_chat(self):
        whole = self.ollama_ask(model=f"{self.model}:latest")
        assert whole.message.content == self.want and whole.done and whole.prompt_eval_count == self.tokens, whole
        lines = list(self.ollama_ask(stream=True))
        assert "".join(line.message.content or "" for line in lines) == self.want
        assert lines[-1].done_reason in ("stop", "length") and not lines[0].done
        room = self.ollama_ask(format=SCHEMA, options={"seed": 1})
        assert json.loads(room.message.content)["room"] in ("hall", "attic")

    def ollama_generate(self):
        options = {"num_predict": 16, "temperature": 0}
        assert self.ollama.generate(model=self.model, prompt=PROMPT, options=options).response == self.want
        raw = self.ollama.generate(model=self.model, prompt="It was", raw=True, options=options)
        want = self.openai.completions.create(model=self.model, prompt="It was", max_tokens=16, temperature=0)
        assert raw.response == want.choices[0].text
        lines = list(self.ollama.generate(model=self.model, prompt=PROMPT, options=options, stream=True))
        assert "".join(line.response for line in lines) == self.want and lines[-1].done

    def ollama_models(self):
        assert [model.model for model in self.ollama.list().models] == [self.model]
        assert self.ollama.show(self.model).modelinfo["larder.context_length"] > 0
        assert self.ollama.ps().models[0].context_length > 0

    def ollama_errors(self):
        error = raises(ollama.ResponseError, lambda: self.ollama_ask(model="x"))
        assert error.status_code == 404 and "x" in error.error
        assert raises(ollama.ResponseError, lambda: self.ollama_ask(options={"temperature": 9})).status_code == 400
        raises(ollama.ResponseError, lambda: list(self.ollama_ask(options={"temperature": 9}, stream=True)))

    def ollama_load(self):
        assert self.ollama_ask(messages=[]).done_reason == "load"
        (line,) = self.ollama_ask(messages=[], stream=True)
        assert line.done and line.message.content == ""

    def responses_tools(self):
        tool = {"type": "function", "name": "enter", "description": "Enters a room.", "parameters": SCHEMA, "strict": True}
        ask = dict(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=400)
        call = next(item for item in self.respond(**ask).output if item.type == "function_call")
        assert call.name == "enter" and json.loads(call.arguments)["room"] in ("hall", "attic"), call
        events = list(self.respond(stream=True, **ask))
        deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        done = next(event for event in events if event.type == "response.function_call_arguments.done")
        assert deltas == done.arguments and json.loads(deltas)["room"], events
        turn = [{"role": "user", "content": PROMPT}, call,
                {"type": "function_call_output", "call_id": call.call_id, "output": "It is dark."}]
        assert self.respond(input=turn, tools=[tool]).output

    def messages_tools(self):
        tool = {"name": "enter", "description": "Enters a room.", "input_schema": SCHEMA}
        choice = {"type": "tool", "name": "enter", "disable_parallel_tool_use": True}
        ask = dict(tools=[tool], tool_choice=choice, max_tokens=400)
        answer = self.message_of(**ask)
        call = next(block for block in answer.content if block.type == "tool_use")
        assert answer.stop_reason == "tool_use" and call.input["room"] in ("hall", "attic"), answer
        messages = [{"role": "user", "content": PROMPT}]
        with self.anthropic.messages.stream(model=self.model, messages=messages, extra_body={"temperature": 0}, **ask) as stream:
            final = stream.get_final_message()
        assert [b.input for b in final.content if b.type == "tool_use"] == [call.input], final
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is dark.", "is_error": True}
        turns = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert self.message_of(messages=turns, tools=[tool]).content is not None

    def ollama_tools(self):
        tool = {"type": "function", "function": {"name": "enter", "description": "Enters a room.", "parameters": SCHEMA}}
        assert self.ollama_ask(tools=[tool]).done


if __name__ == "__main__":
    main()
