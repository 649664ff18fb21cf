// The official providers of OpenAI, Anthropic and Workers AI with `ai`, unmodified: prints what each call returned, by
// API, as one JSON object.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";
import { createWorkersAI } from "workers-ai-provider";

const [url, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey });
// This provider has no setting for its host. Everything else of a request stays as it is.
const here = (target, init) => fetch(String(target).replace("https://api.cloudflare.com", url), init);
const workersAI = createWorkersAI({ accountId: "acme", apiKey, fetch: here });
const apis = { responses: openai.responses, chat: openai.chat, messages: anthropic, run: workersAI };

async function answersOf(modelOf) {
  const request = { model: modelOf("@cf/meta/tiny:8b"), prompt: "hi there", maxOutputTokens: 4, maxRetries: 0 };
  const answer = await generateText(request);
  const stream = streamText(request);
  const kinds = [];
  for await (const part of stream.fullStream) kinds.push(part.type);
  const usage = await stream.usage;
  const refused = await generateText({ ...request, model: modelOf("@cf/meta/none") }).catch((error) => error);
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
