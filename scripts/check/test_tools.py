"""Tool calls and structured output of a running `larder serve`, with the Python clients of OpenAI and LangChain.

    pip install openai langchain langchain-openai
    scripts/check/serve.sh model DIR            # a tiny model with a tool template
    larder serve -m DIR --context 4096
    python scripts/check/test_tools.py --url http://127.0.0.1:8080

The model's weights are random; grammars make its calls valid. Prints `ok` for each check; exits with 1 if one fails.
"""

import argparse
import json
from typing import Literal

import openai
import pydantic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

TOKENS = 1500


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    where = {"base_url": f"{args.url}/v1", "api_key": args.api_key}
    model = openai.OpenAI(**where).models.list().data[0].id
    client, chain = OpenAi(model, where), LangChain(model, where)
    for check in (client.required, client.named, client.streamed, client.parsed, client.refused,
                  chain.structured, chain.bound, chain.agent, chain.streamed):
        check()
        print(f"ok {check.__qualname__}", flush=True)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


QUESTION = [{"role": "user", "content": "How warm is it?"}]


class OpenAi:
    def __init__(self, model, where):
        self.client, self.model = openai.OpenAI(max_retries=0, **where), model
        self.tools = [openai.pydantic_function_tool(Weather, name="weather")]

    def ask(self, **more):
        given = {"model": self.model, "messages": QUESTION, "tools": self.tools, "max_tokens": TOKENS, "seed": 3}
        return self.client.chat.completions.create(**(given | more))

    def required(self):
        choice = self.ask(tool_choice="required").choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
        for call in choice.message.tool_calls:
            Weather.model_validate_json(call.function.arguments)
            assert call.function.name == "weather" and call.type == "function" and call.id, call

    def named(self):
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = self.ask(tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        Weather.model_validate_json(call.function.arguments)

    def streamed(self):
        given = {"model": self.model, "messages": QUESTION, "tools": self.tools, "max_tokens": TOKENS, "seed": 4}
        with self.client.chat.completions.stream(tool_choice="required", **given) as stream:
            events = [event.type for event in stream]
            calls = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events, set(events)
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls), calls

    def parsed(self):
        answer = self.client.chat.completions.parse(model=self.model, messages=QUESTION, tools=self.tools,
                                                    tool_choice="required", max_tokens=TOKENS, seed=5)
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in answer.choices[0].message.tool_calls)

    def refused(self):
        try:
            self.ask(tool_choice={"type": "function", "function": {"name": "nothing"}})
        except openai.BadRequestError as error:
            assert error.param == "tool_choice", error
        else:
            raise AssertionError("an unknown tool was called")


@tool(args_schema=Weather)
def weather(city: str, unit: str) -> str:
    """The weather of a city."""
    return f"21 {unit} in {city}"


class LangChain:
    def __init__(self, model, where):
        self.chat = ChatOpenAI(model=model, max_tokens=TOKENS, max_retries=0, seed=6, **where)

    def structured(self):
        for method in ("json_schema", "function_calling", "json_mode"):
            # Any JSON object is valid in JSON mode, so there it is not parsed as the class.
            schema = None if method == "json_mode" else Weather
            answer = self.chat.with_structured_output(schema, method=method, include_raw=True).invoke("In JSON: how warm is it?")
            if schema:
                assert isinstance(answer["parsed"], Weather), (method, answer)
            else:
                assert isinstance(json.loads(answer["raw"].content), dict), answer

    def bound(self):
        answer = self.chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke("How warm is it?")
        (call,) = answer.tool_calls
        assert call["name"] == "weather" and set(call["args"]) == {"city", "unit"}, answer

    def agent(self):
        """One turn with a tool and one without, as an agent's loop makes them."""
        messages = [HumanMessage("How warm is it?")]
        called = self.chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke(messages)
        results = [weather.invoke(call) for call in called.tool_calls]
        assert all(isinstance(result, ToolMessage) for result in results), results
        last = self.chat.bind_tools([weather], tool_choice="none").invoke([*messages, called, *results], max_tokens=8)
        assert isinstance(last, AIMessage) and not last.tool_calls and last.content, last

    def streamed(self):
        whole = None
        for chunk in self.chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).stream("How warm?"):
            whole = chunk if whole is None else whole + chunk
        (call,) = whole.tool_calls
        assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome"), whole


if __name__ == "__main__":
    main()
