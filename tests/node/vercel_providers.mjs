// The providers `@ai-sdk/openai` and `@ai-sdk/anthropic` with `ai`, unmodified: prints what each call returned, by API,
// as one JSON object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [url, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey });
const apis = { responses: openai.responses, chat: openai.chat, messages: anthropic };

async function answersOf(modelOf) {
  const request = { model: modelOf("tiny"), prompt: "hi there", maxOutputTokens: 4, maxRetries: 0 };
  const answer = await generateText(request);
  const stream = streamText(request);
  const kinds = [];
  for await (const part of stream.fullStream) kinds.push(part.type);
  const usage = await stream.usage;
  const refused = await generateText({ ...request, model: modelOf("none") }).catch((error) => error);
  const abort = new AbortController();
  const endless = streamText({ ...request, maxOutputTokens: 4000, abortSignal: abort.signal });
  for await (const _ of endless.textStream) break;
  abort.abort();
  return {
    text: answer.text, reason: answer.finishReason, kinds,
    streamed: await stream.text, tokens: [usage.inputTokens, usage.outputTokens],
    refused: { status: refused.statusCode, retryable: refused.isRetryable },
  };
}

const results = {};
for (const [name, modelOf] of Object.entries(apis)) results[name] = await answersOf(modelOf);
console.log(JSON.stringify(results));
