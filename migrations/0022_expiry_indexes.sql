-- Rows past their retention are looked for every few minutes, mostly in vain: without these, each
-- time among all days of all keys, and all answers of a day.

CREATE INDEX key_day_by_day ON key_day (day);
CREATE INDEX idempotency_by_age ON idempotency (created_at);
