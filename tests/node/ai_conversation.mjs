// A conversation with `@ai-sdk/openai`, unmodified, which refers to its earlier answers unless `store` is false:
// prints the text of each turn, by `store`, as one JSON object.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [url, apiKey] = process.argv.slice(2);
const model = createOpenAI({ baseURL: `${url}/v1`, apiKey })("tiny");

async function conversation(store) {
  const messages = [];
  const texts = [];
  for (const prompt of ["one", "two", "three"]) {
    messages.push({ role: "user", content: prompt });
    const request = { model, messages, maxOutputTokens: 2, maxRetries: 0, providerOptions: { openai: { store } } };
    const answer = prompt === "two" ? streamText(request) : await generateText(request);
    texts.push(await answer.text);
    messages.push(...(await answer.response).messages);
  }
  return texts;
}

console.log(JSON.stringify({ stored: await conversation(true), unstored: await conversation(false) }));
