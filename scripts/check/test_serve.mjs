// Drives a running `larder serve` with OpenAI's own Node client.
//
//     npm install openai zod
//     node scripts/check/test_serve.mjs http://127.0.0.1:8080
//     node scripts/check/test_serve.mjs http://127.0.0.1:8080 --tools
//
// With `--tools`, checks tool calls instead, of a model whose template has them (`scripts/check/serve.sh model DIR`).
// Node looks for `openai` beside this file and in the folders above; it ignores NODE_PATH for modules.
// Prints `ok` for each check; exits with 1 if one fails.

import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const url = process.argv[2] ?? "http://127.0.0.1:8080";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.LARDER_API_KEY ?? "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tell me about the old house." }];
const ask = { model, messages, temperature: 0, max_tokens: 16, ignore_eos: true };
const Room = z.object({ level: z.number().int(), dark: z.boolean(), name: z.enum(["hall", "attic"]) });
const enter = zodFunction({ name: "enter", parameters: z.object({ room: z.enum(["hall", "attic"]) }) });

const ofText = {
  async chat() {
    const answer = await client.chat.completions.create(ask);
    assert.equal(answer.choices[0].message.role, "assistant");
    assert.equal(answer.usage.completion_tokens, 16);
  },

  async streaming() {
    const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
    let text = "";
    let usage = null;
    const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole);
    assert.equal(usage.completion_tokens, 16);
  },

  async stop() {
    const whole = (await client.chat.completions.create({ ...ask, max_tokens: 32 })).choices[0].message.content;
    const stop = whole.slice(whole.length / 2, whole.length / 2 + 3);
    const cut = await client.chat.completions.create({ ...ask, max_tokens: 32, stop });
    assert.equal(cut.choices[0].message.content, whole.slice(0, whole.indexOf(stop)));
    assert.equal(cut.choices[0].finish_reason, "stop");
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ ...ask, model: "x" }), { status: 404, code: "model_not_found" });
    await assert.rejects(client.chat.completions.create({ ...ask, n: 65 }), { status: 400, param: "n" });
    await assert.rejects(client.embeddings.create({ model, input: "" }), { status: 400 });
  },

  async parsed() {
    const answer = await client.chat.completions.parse({ model, messages, max_tokens: 400, response_format: zodResponseFormat(Room, "room") });
    assert.ok(["hall", "attic"].includes(answer.choices[0].message.parsed.name));
  },

  async responses() {
    const given = { model, input: messages[0].content, temperature: 0, max_output_tokens: 16 };
    const whole = await client.responses.create(given);
    assert.equal(whole.usage.output_tokens, 16);
    const stream = client.responses.stream(given);
    let text = "";
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    const final = await stream.finalResponse();
    assert.equal(text, whole.output_text);
    assert.equal(final.output_text, whole.output_text);
    const parsed = await client.responses.parse({ ...given, max_output_tokens: 400, text: { format: zodTextFormat(Room, "room") } });
    assert.ok(["hall", "attic"].includes(parsed.output_parsed.name));
  },

  async cancellation() {
    const stream = await client.chat.completions.create({ ...ask, max_tokens: 1000, stream: true });
    for await (const _ of stream) {
      stream.controller.abort();
      break;
    }
    for (let i = 0; ; i++) {
      const health = await (await fetch(`${url}/health`)).json();
      if (health.active === 0) break;
      assert.ok(i < 200, "the slot was not freed");
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  },
};

const ofTools = {
  async calls() {
    const given = { model, messages, tools: [enter], tool_choice: "required", parallel_tool_calls: false, max_tokens: 1500, seed: 3 };
    const [choice] = (await client.chat.completions.parse(given)).choices;
    const [call] = choice.message.tool_calls;
    assert.equal(choice.finish_reason, "tool_calls");
    assert.ok(["hall", "attic"].includes(call.function.parsed_arguments.room));
    const stream = client.chat.completions.stream(given);
    let deltas = "";
    stream.on("tool_calls.function.arguments.delta", (event) => (deltas += event.arguments_delta));
    const [streamed] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    assert.equal(deltas, streamed.function.arguments);
    assert.deepEqual(streamed.function.parsed_arguments, call.function.parsed_arguments);
  },

  async turns() {
    const given = { model, tools: [enter], max_tokens: 400, seed: 3 };
    const called = await client.chat.completions.create({ ...given, messages, tool_choice: "required", parallel_tool_calls: false, max_tokens: 1500 });
    const { message } = called.choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "It is dark." };
    const answer = await client.chat.completions.create({ ...given, messages: [...messages, message, result], tool_choice: "none" });
    assert.equal(answer.choices[0].message.tool_calls, undefined);
    assert.equal(typeof answer.choices[0].message.content, "string");
  },

  async responses() {
    const { name, parameters, strict } = enter.function;
    const tools = [{ type: "function", name, parameters, strict }];
    const given = { model, input: messages[0].content, tools, tool_choice: "required", parallel_tool_calls: false, max_output_tokens: 1500 };
    const call = (await client.responses.create(given)).output.find((item) => item.type === "function_call");
    assert.ok(["hall", "attic"].includes(JSON.parse(call.arguments).room));
  },
};

const checks = process.argv.includes("--tools") ? ofTools : ofText;
for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok ${name}`);
}
