// The official `openai`, unmodified: prints what each call returned as one JSON object.
const { OpenAI } = require("openai");

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const request = { model: "tiny", max_tokens: 4, messages: [{ role: "user", content: "hi there" }] };

async function main() {
  const chat = await client.chat.completions.create(request);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  const response = await client.responses.create({ model: "tiny", input: "hi", max_output_tokens: 4 });
  const kinds = [];
  for await (const event of await client.responses.create({ model: "tiny", input: "hi", stream: true })) {
    kinds.push(event.type);
  }
  const models = [];
  for await (const model of client.models.list()) {
    models.push(model.id);
  }
  const refused = await client.chat.completions.create({ ...request, model: "none" })
    .catch((error) => error);
  const endless = await client.chat.completions.create({ ...request, max_tokens: 4000, stream: true });
  for await (const _ of endless) break;
  endless.controller.abort();
  console.log(JSON.stringify({
    chat, text, response, kinds, models,
    refused: { name: refused.constructor.name, status: refused.status, type: refused.type },
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
