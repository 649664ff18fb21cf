// The official `@anthropic-ai/sdk`, unmodified: prints what each call returned as one JSON object.
const { Anthropic } = require("@anthropic-ai/sdk");

const [baseURL, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });
const request = { model: "tiny", max_tokens: 4, messages: [{ role: "user", content: "hi there" }] };

async function main() {
  const message = await client.messages.create(request);
  const kinds = [];
  for await (const event of await client.messages.create({ ...request, stream: true })) {
    kinds.push(event.type);
  }
  const final = await client.messages.stream(request).finalMessage();
  const counted = await client.messages.countTokens({
    model: request.model,
    messages: request.messages,
  });
  const models = [];
  for await (const model of client.models.list()) {
    models.push(model.id);
  }
  const refused = await client.messages.create({ ...request, model: "none" }).catch((error) => error);
  const endless = await client.messages.create({ ...request, max_tokens: 4000, stream: true });
  for await (const event of endless) {
    if (event.type === "content_block_delta") break;
  }
  endless.controller.abort();
  console.log(JSON.stringify({
    message, kinds, final, counted, models,
    refused: { name: refused.constructor.name, status: refused.status, type: refused.type },
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
