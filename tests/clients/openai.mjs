// A session of OpenAI's JavaScript client: node openai.mjs http://127.0.0.1:8000 KEY

import assert from "node:assert/strict";
import OpenAI from "openai";
import { ASK, BASE, CITY, KEY, session, untilIdle } from "./common.mjs";

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const args = { model, messages: ASK, max_tokens: 12, temperature: 0 };
const tool = { type: "function", function: { name: "get_weather", description: "Weather of a city", parameters: CITY } };

await session({
  async models() {
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async completions() {
    const whole = await client.completions.create({ model, prompt: ["Once upon", "The sky"], max_tokens: 5, n: 2, logprobs: 2, seed: 1 });
    assert.equal(whole.choices.length, 4);
    assert.deepEqual(whole.choices.map((choice) => choice.index), [0, 1, 2, 3]);
    const { tokens, token_logprobs, top_logprobs, text_offset } = whole.choices[0].logprobs;
    for (const list of [tokens, token_logprobs, top_logprobs, text_offset]) assert.equal(list.length, 5);
    const plain = { model, prompt: "Once upon", max_tokens: 8, temperature: 0 };
    let text = "";
    for await (const chunk of await client.completions.create({ ...plain, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, (await client.completions.create(plain)).choices[0].text);
  },

  async chats() {
    const whole = await client.chat.completions.create({ ...args, logprobs: true, top_logprobs: 2 });
    const [choice] = whole.choices;
    assert.equal(choice.logprobs.content.length, whole.usage.completion_tokens);
    assert.ok(choice.logprobs.content.every((entry) => entry.top_logprobs.length === 2 && entry.bytes.length > 0));
    const several = await client.chat.completions.create({ ...args, temperature: 1, seed: 1, n: 3 });
    assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1, 2]);
  },

  async streams() {
    const whole = await client.chat.completions.create(args);
    let text = "", usage = null, last = null;
    for await (const chunk of await client.chat.completions.create({ ...args, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
      last = chunk.choices[0]?.finish_reason ?? last;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(last, whole.choices[0].finish_reason);
    assert.equal(usage.total_tokens, whole.usage.total_tokens);
    // The client's own accumulator accepts the stream too.
    const runner = client.chat.completions.stream(args);
    assert.equal((await runner.finalChatCompletion()).choices[0].message.content, text);
  },

  async tools() {
    const asked = { ...args, max_tokens: 60, tools: [tool] };
    const whole = await client.chat.completions.create({ ...asked, tool_choice: "required", parallel_tool_calls: false });
    assert.equal(whole.choices[0].message.tool_calls[0].function.name, "get_weather");
    const named = { type: "function", function: { name: "get_weather" } };
    const message = await client.chat.completions.stream({ ...asked, tool_choice: named }).finalMessage();
    const [call] = message.tool_calls;
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
    // The answer of the tool goes back.
    const messages = [...ASK, message, { role: "tool", tool_call_id: call.id, content: "Sunny" }];
    const after = await client.chat.completions.create({ ...asked, messages, tool_choice: "none" });
    assert.equal(typeof after.choices[0].message.content, "string");
  },

  async schemas() {
    const response_format = { type: "json_schema", json_schema: { name: "city", schema: CITY, strict: true } };
    const answer = await client.chat.completions.create({ ...args, max_tokens: 60, response_format });
    if (answer.choices[0].finish_reason === "stop") assert.equal(typeof JSON.parse(answer.choices[0].message.content).city, "string");
    const object = await client.chat.completions.create({ ...args, max_tokens: 60, response_format: { type: "json_object" } });
    if (object.choices[0].finish_reason === "stop") assert.equal(typeof JSON.parse(object.choices[0].message.content), "object");
  },

  async responses() {
    const asked = { model, input: "Say hi", max_output_tokens: 12, temperature: 0 };
    const whole = await client.responses.create(asked);
    let text = "", number = -1;
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      assert.equal(event.sequence_number, ++number);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    assert.equal((await client.responses.retrieve(whole.id)).id, whole.id);
    await client.responses.delete(whole.id);
    await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  },

  async errors() {
    const rejects = (extra, kind, field, value) =>
      assert.rejects(client.chat.completions.create({ ...args, ...extra }), (error) => error instanceof kind && error[field] === value);
    await rejects({ model: "nobody" }, OpenAI.NotFoundError, "code", "model_not_found");
    await rejects({ temperature: -1 }, OpenAI.BadRequestError, "param", "temperature");
    await rejects({ max_tokens: 1e6 }, OpenAI.BadRequestError, "code", "context_length_exceeded");
    await rejects({ stream: true, max_tokens: 1e6 }, OpenAI.BadRequestError, "code", "context_length_exceeded");
    const stranger = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },

  async aborts() {
    const stream = await client.chat.completions.create({ ...args, max_tokens: 2000, stream: true, ignore_eos: true });
    for await (const _ of stream) break;
    await untilIdle();
    const controller = new AbortController();
    const whole = client.chat.completions.create({ ...args, max_tokens: 2000, ignore_eos: true }, { signal: controller.signal });
    setTimeout(() => controller.abort(), 300);
    await assert.rejects(whole, OpenAI.APIUserAbortError);
    await untilIdle();
  },
});
