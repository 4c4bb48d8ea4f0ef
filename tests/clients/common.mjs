// What the sessions of JavaScript clients share: the question, the schema, the tool, and the engine's own counters.

import assert from "node:assert/strict";

export const [BASE, KEY] = process.argv.slice(2);
export const ASK = [{ role: "user", content: "Say hi" }];
export const CITY = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};

/** The value of a gauge that has one series. */
export async function gauge(name) {
  const page = await (await fetch(`${BASE}/metrics`)).text();
  const line = page.split("\n").find((line) => line.startsWith(`${name}{`));
  assert.ok(line, `no metric ${name}`);
  return Number(line.slice(line.lastIndexOf(" ") + 1));
}

/** Waits until nothing runs: what an abort must come to. */
export async function untilIdle() {
  const deadline = Date.now() + 20_000;
  while ((await gauge("vllm:num_requests_running")) + (await gauge("vllm:num_requests_waiting")) !== 0) {
    assert.ok(Date.now() < deadline, "the request still runs");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Runs the parts one after the other and names each that passed. */
export async function session(parts) {
  for (const [name, part] of Object.entries(parts)) {
    await part();
    console.log(`ok: ${name}`);
  }
}
