// The official `cloudflare`, unmodified: prints what each call returned as one JSON object.
const { Cloudflare } = require("cloudflare");

const [url, apiToken] = process.argv.slice(2);
const client = new Cloudflare({ baseURL: `${url}/client/v4`, apiToken, maxRetries: 0 });

async function main() {
  const model = "@cf/meta/tiny:8b";
  const input = { account_id: "acme", prompt: "hi there", max_tokens: 4 };
  const answer = await client.ai.run(model, input);
  const refused = await client.ai.run("@cf/meta/none", input).catch((error) => error);
  const models = [];
  for await (const model of client.ai.models.list({ account_id: "acme", per_page: 1 })) {
    models.push(model.name);
  }
  const authors = [];
  for await (const author of client.ai.authors.list({ account_id: "acme" })) {
    authors.push(author.name);
  }
  const body = { prompt: "hi there", max_tokens: 4000, stream: true };
  const path = `/accounts/acme/ai/run/${encodeURIComponent(model)}`;
  const endless = await client.post(path, { body, __binaryResponse: true });
  const reader = endless.body.getReader();
  await reader.read();
  await reader.cancel();
  console.log(JSON.stringify({
    answer, models, authors, refused: { name: refused.constructor.name, status: refused.status },
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
