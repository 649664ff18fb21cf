// The official `cloudflare`, unmodified: prints what each call returned as one JSON object.
const { Cloudflare } = require("cloudflare");

const [url, apiToken] = process.argv.slice(2);
const client = new Cloudflare({ baseURL: `${url}/client/v4`, apiToken, maxRetries: 0 });

async function main() {
  const model = "@cf/meta/tiny:8b";
  const input = { account_id: "acme", prompt: "hi there", max_tokens: 4 };
  const answer = await client.ai.run(model, input);
  const refused = await client.ai.run("@cf/meta/none", input).catch((error) => error);
  console.log(JSON.stringify({
    answer, refused: { name: refused.constructor.name, status: refused.status },
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
