// Loops of tool calls with the official SDKs, unmodified, until no more tools are called: prints for each
// loop the calls of its steps and its last text as one JSON object.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { createWorkersAI } from "workers-ai-provider";

const [url, apiKey, prompt] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const here = (target, init) => fetch(String(target).replace("https://api.cloudflare.com", url), init);
const provider = createWorkersAI({ accountId: "acme", apiKey, fetch: here });

const said = { weather: (of) => `sunny in ${of.city}`, clock: (of) => `noon in ${of.zone}` };
const object = (name) => ({ type: "object", properties: { [name]: { type: "string" } }, required: [name] });
const schemas = { weather: object("city"), clock: object("zone") };
const names = Object.keys(schemas);
const messages = [{ role: "user", content: prompt }];
const model = "@cf/meta/tiny:8b";

const openaiTools = names.map((name) => ({
  type: "function",
  function: { name, parameters: schemas[name], parse: JSON.parse, function: said[name] },
}));
const anthropicTools = names.map((name) =>
  betaTool({ name, description: name, inputSchema: schemas[name], run: said[name] }));
const aiTools = Object.fromEntries(names.map((name) => [
  name, tool({ inputSchema: jsonSchema(schemas[name]), execute: async (of) => said[name](of) }),
]));

async function chat(stream) {
  const runner = openai.chat.completions.runTools({ model, messages, tools: openaiTools, stream });
  const text = await runner.finalContent();
  const steps = runner.messages.filter((one) => one.tool_calls)
    .map((one) => one.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]));
  return { steps, text };
}

async function responses(stream) {
  const tools = names.map((name) => ({ type: "function", name, parameters: schemas[name], strict: false }));
  const input = [...messages];
  const steps = [];
  for (;;) {
    const request = { model, input, tools };
    const answer = stream
      ? await openai.responses.stream(request).finalResponse()
      : await openai.responses.create(request);
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return { steps, text: answer.output_text };
    input.push(...answer.output);
    steps.push(calls.map((call) => [call.name, JSON.parse(call.arguments)]));
    for (const call of calls) {
      const output = said[call.name](JSON.parse(call.arguments));
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

async function anthropicLoop(stream) {
  const request = { model, max_tokens: 1000, messages, tools: anthropicTools, stream };
  const steps = [];
  let answer;
  for await (const turn of anthropic.beta.messages.toolRunner(request)) {
    answer = stream ? await turn.finalMessage() : turn;
    const calls = answer.content.filter((block) => block.type === "tool_use");
    if (calls.length) steps.push(calls.map((call) => [call.name, call.input]));
  }
  return { steps, text: answer.content[0].text, reason: answer.stop_reason };
}

async function workersAi(stream) {
  const request = { model: provider(model), prompt, tools: aiTools, stopWhen: stepCountIs(5), maxRetries: 0 };
  const result = stream ? streamText(request) : await generateText(request);
  if (stream) await result.consumeStream();
  const steps = (await result.steps).filter((step) => step.toolCalls.length)
    .map((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
  return { steps, text: await result.text, reason: await result.finishReason };
}

const loops = { chat, responses, anthropic: anthropicLoop, workersAi };
const results = {};
for (const [name, loop] of Object.entries(loops)) {
  results[name] = [];
  for (const stream of [false, true]) {
    results[name].push(await loop(stream).catch((error) => ({ error: String(error.stack ?? error) })));
  }
}
console.log(JSON.stringify(results));
