// The official `workers-ai-provider` with `ai`, unmodified: prints what each call returned as one JSON object.
import { generateText, streamText } from "ai";
import { createWorkersAI } from "workers-ai-provider";

const [url, apiKey] = process.argv.slice(2);
// The provider has no setting for its host. Everything else of a request stays as it is.
const here = (target, init) => fetch(String(target).replace("https://api.cloudflare.com", url), init);
const provider = createWorkersAI({ accountId: "acme", apiKey, fetch: here });
const request = { model: provider("@cf/meta/tiny:8b"), prompt: "hi there", maxOutputTokens: 4, maxRetries: 0 };

const answer = await generateText(request);
const stream = streamText(request);
const kinds = [];
for await (const part of stream.fullStream) kinds.push(part.type);
const usage = await stream.usage;
const refused = await generateText({ ...request, model: provider("@cf/meta/none") }).catch((error) => error);
const abort = new AbortController();
const endless = streamText({ ...request, maxOutputTokens: 4000, abortSignal: abort.signal });
for await (const _ of endless.textStream) break;
abort.abort();
console.log(JSON.stringify({
  text: answer.text, reason: answer.finishReason, kinds,
  streamed: await stream.text, tokens: [usage.inputTokens, usage.outputTokens],
  refused: { status: refused.statusCode, retryable: refused.isRetryable },
}));
