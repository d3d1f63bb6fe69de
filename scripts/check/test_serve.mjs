// Drives a running `larder serve` with OpenAI's own Node client.
//
//     npm install openai
//     node scripts/check/test_serve.mjs http://127.0.0.1:8080
//
// Node looks for `openai` beside this file and in the folders above; it ignores NODE_PATH for modules.
// Prints `ok` for each check; exits with 1 if one fails.

import assert from "node:assert/strict";

import OpenAI from "openai";

const url = process.argv[2] ?? "http://127.0.0.1:8080";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.LARDER_API_KEY ?? "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tell me about the old house." }];
const ask = { model, messages, temperature: 0, max_tokens: 16, ignore_eos: true };

const checks = {
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

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok ${name}`);
}
