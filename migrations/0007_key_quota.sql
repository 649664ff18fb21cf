-- What a key used on a day (UTC), for the keys that have a quota. Usage that is counted once is
-- counted here once: a row that was there already fires no trigger.

CREATE TABLE key_day (
    key_id text NOT NULL REFERENCES api_key ON DELETE CASCADE,
    day    date NOT NULL,
    tokens bigint NOT NULL DEFAULT 0,
    spend  double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (key_id, day)
);

-- What is yet to be added to key_day. Rows are only appended here, so that two batches of usage
-- with the same keys never wait for one another.
CREATE TABLE key_use (
    key_id text NOT NULL,
    day    date NOT NULL,
    tokens bigint NOT NULL,
    spend  double precision NOT NULL
);

-- What some tokens of a deployment cost by its model's price now; 0 where it has none.
CREATE FUNCTION spend_of(which text, prompt bigint, cached bigint, output bigint)
RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(
        (prompt - cached) * coalesce((price->>'prompt_per_million')::float8, 0)
        + cached * coalesce((price->>'cached_per_million')::float8,
                            (price->>'prompt_per_million')::float8, 0)
        + output * coalesce((price->>'output_per_million')::float8, 0)
    ) / 1e6, 0)
    FROM (
        SELECT m.spec->'price' AS price FROM deployment d JOIN model m USING (model_id)
        WHERE d.deployment_id = which
    ) AS priced
$$;

CREATE FUNCTION usage_counts_for_its_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO key_use (key_id, day, tokens, spend)
    SELECT NEW.key_id, (NEW.started_at AT TIME ZONE 'UTC')::date,
           NEW.prompt_tokens + NEW.output_tokens,
           spend_of(NEW.deployment_id, NEW.prompt_tokens, NEW.cached_tokens, NEW.output_tokens)
    FROM api_key k
    WHERE k.key_id = NEW.key_id
        AND (coalesce((k.limits->>'tokens_per_day')::float8, 0) > 0
             OR coalesce((k.limits->>'spend_per_day')::float8, 0) > 0);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_counts AFTER INSERT ON usage
    FOR EACH ROW EXECUTE FUNCTION usage_counts_for_its_key();
