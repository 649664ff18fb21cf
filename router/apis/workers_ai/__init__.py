"""The Workers AI surface: `/ai/run/{model}`, as Cloudflare documents it."""
