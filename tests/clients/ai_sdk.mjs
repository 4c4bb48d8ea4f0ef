// A session of Vercel's AI SDK, with its provider for compatible servers and with its provider for OpenAI (chat and
// responses): node ai_sdk.mjs http://127.0.0.1:8000 KEY

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { ASK, BASE, CITY, KEY, session, untilIdle } from "./common.mjs";

const options = { name: "kvasir", baseURL: `${BASE}/v1`, apiKey: KEY };
const compatible = createOpenAICompatible({ ...options, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI(options);
const { data } = await (await fetch(`${BASE}/v1/models`, { headers: { authorization: `Bearer ${KEY}` } })).json();
const id = data[0].id;
const limits = { maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
const weather = tool({ description: "Weather of a city", inputSchema: jsonSchema(CITY), execute: async ({ city }) => `Sunny in ${city}` });

function chats(model) {
  return async () => {
    const whole = await generateText({ model, messages: ASK, ...limits });
    assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0);
    const stream = streamText({ model, messages: ASK, ...limits, onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    assert.equal(await stream.finishReason, whole.finishReason);
  };
}

function tools(model) {
  return async () => {
    const asked = { model, messages: ASK, ...limits, maxOutputTokens: 60, tools: { get_weather: weather } };
    const named = await generateText({ ...asked, toolChoice: { type: "tool", toolName: "get_weather" } });
    assert.equal(typeof named.toolCalls[0].input.city, "string");
    assert.match(named.toolResults[0].output, /^Sunny in/);
    const stream = streamText({ ...asked, toolChoice: { type: "tool", toolName: "get_weather" }, onError: ({ error }) => { throw error; } });
    await stream.consumeStream();
    assert.equal((await stream.toolCalls)[0].toolName, "get_weather");
    assert.deepEqual((await stream.toolCalls)[0].input, named.toolCalls[0].input);
    // The call and its result go back to the model in a second step.
    const toolChoice = { type: "tool", toolName: "get_weather" };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? toolChoice : "none" });
    const steps = await generateText({ ...asked, stopWhen: stepCountIs(2), prepareStep });
    assert.equal(steps.steps.length, 2);
  };
}

function objects(model) {
  return async () => {
    const schema = jsonSchema(CITY);
    const output = Output.object({ schema, name: "city" });
    const whole = await generateText({ model, messages: ASK, ...limits, maxOutputTokens: 60, output });
    assert.equal(typeof whole.output.city, "string");
    const stream = streamText({ model, messages: ASK, ...limits, maxOutputTokens: 60, output, onError: ({ error }) => { throw error; } });
    await stream.consumeStream();
    assert.deepEqual(await stream.output, whole.output);
  };
}

const choose = { compatible: compatible(id), "openai chat": openai.chat(id), "openai responses": openai.responses(id) };
const parts = {};
for (const [name, model] of Object.entries(choose)) {
  parts[`chats (${name})`] = chats(model);
  parts[`tools (${name})`] = tools(model);
  parts[`objects (${name})`] = objects(model);
}

await session({
  ...parts,

  async completions() {
    const whole = await generateText({ model: compatible.completionModel(id), prompt: "Once upon", ...limits });
    const stream = streamText({ model: compatible.completionModel(id), prompt: "Once upon", ...limits });
    assert.equal(await stream.text, whole.text);
  },

  async logprobs() {
    const providerOptions = { openai: { logprobs: 2 } };
    const whole = await generateText({ model: openai.chat(id), messages: ASK, ...limits, providerOptions });
    assert.equal(whole.providerMetadata.openai.logprobs.length, whole.usage.outputTokens);
  },

  async errors() {
    const status = (code) => (error) => APICallError.isInstance(error) && error.statusCode === code;
    await assert.rejects(generateText({ model: compatible("nobody"), messages: ASK, ...limits }), status(404));
    await assert.rejects(generateText({ model: compatible(id), messages: ASK, ...limits, maxOutputTokens: 1e6 }), status(400));
    const stranger = createOpenAICompatible({ ...options, apiKey: "wrong" });
    await assert.rejects(generateText({ model: stranger(id), messages: ASK, ...limits }), status(401));
  },

  async aborts() {
    const controller = new AbortController();
    const long = { model: compatible(id), messages: ASK, ...limits, maxOutputTokens: 2000, abortSignal: controller.signal };
    const stream = streamText({ ...long, providerOptions: { kvasir: { ignore_eos: true } }, onError: () => {} });
    for await (const _ of stream.textStream) controller.abort();
    await untilIdle();
  },
});
