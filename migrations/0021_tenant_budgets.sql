-- A tenant's budget above its keys is a row of api_key whose id is 'tenant:' and the tenant's: routers get
-- it with the keys. It has no secret, so that no key of a client is it.

CREATE OR REPLACE FUNCTION usage_counts_for_its_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO key_use (key_id, day, tokens, spend)
    SELECT k.key_id, (NEW.started_at AT TIME ZONE 'UTC')::date,
           NEW.prompt_tokens + NEW.output_tokens,
           spend_of(NEW.deployment_id, NEW.prompt_tokens, NEW.cached_tokens, NEW.output_tokens)
    FROM api_key k
    WHERE k.key_id IN (NEW.key_id, 'tenant:' || NEW.tenant_id)
        AND (coalesce((k.limits->>'tokens_per_day')::float8, 0) > 0
             OR coalesce((k.limits->>'spend_per_day')::float8, 0) > 0
             OR coalesce((k.limits->>'tokens_per_month')::float8, 0) > 0
             OR coalesce((k.limits->>'spend_per_month')::float8, 0) > 0);
    RETURN NULL;
END $$;
