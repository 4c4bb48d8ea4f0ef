// llama.cpp through node-llama-cpp: `node llama.mjs MODEL vulkan|cpu` prints one JSON object of tokens per second.
//
// Prompts are ordinary tokens in a fixed order; decoding is greedy. Times are from the outside, as a program sees them.
import { getLlama } from "node-llama-cpp";

const [model_path, kind, output_len] = [process.argv[2], process.argv[3], Number(process.argv[4] ?? 32)];
const is_vulkan = kind === "vulkan";
const llama = await getLlama({ gpu: is_vulkan ? "vulkan" : false, build: "never", logLevel: "error" });
if (is_vulkan && llama.gpu !== "vulkan") throw new Error("no Vulkan build of llama.cpp runs here");
const model = await llama.loadModel({ modelPath: model_path, gpuLayers: is_vulkan ? "max" : 0 });
const prompt = (length, seed) => Array.from({ length }, (_, i) => 1000 + ((i * 7919 + seed * 104729) % 40000));
const seconds = async (work) => {
  const started = performance.now();
  await work();
  return (performance.now() - started) / 1000;
};
const decode = async (sequence, tokens, count) => {
  let last = 0;
  let first_at = 0;
  let seen = 0;
  for await (const _ of sequence.evaluate(tokens, { temperature: 0, yieldEogToken: true })) {
    last = performance.now();
    if (seen++ === 0) first_at = last;
    if (seen > count) break;
  }
  return { tok_s: ((seen - 1) * 1000) / (last - first_at), first_at, last, seen };
};

const result = {};
{
  const context = await model.createContext({ contextSize: 1024, batchSize: 512 });
  const sequence = context.getSequence();
  await sequence.evaluateWithoutGeneratingNewTokens(prompt(32, 1)); // the first evaluation compiles
  await sequence.clearHistory();
  result.prefill_tok_s = 512 / (await seconds(() => sequence.evaluateWithoutGeneratingNewTokens(prompt(512, 2))));
  result.decode_tok_s = (await decode(sequence, [1234], output_len)).tok_s;
  await context.dispose();
}
{
  const rows = is_vulkan ? 8 : 16;
  const context = await model.createContext({ contextSize: 256, sequences: rows, batchSize: 512 });
  const sequences = Array.from({ length: rows }, () => context.getSequence());
  const ran = await Promise.all(sequences.map((s, i) => decode(s, prompt(16, i), is_vulkan ? 8 : output_len)));
  // While all rows decode: from the last first token to the first last one.
  const [begin, end] = [Math.max(...ran.map((r) => r.first_at)), Math.min(...ran.map((r) => r.last))];
  const tokens = ran.reduce((sum, r) => sum + ((r.seen - 1) * (end - begin)) / (r.last - r.first_at), 0);
  result.batch_rows = rows;
  result.batch_decode_tok_s = (tokens * 1000) / (end - begin);
}
console.log(JSON.stringify(result));
process.exit(0);
