-- Lists of files and batches are read in the order of creation. The indexes by id served none: the
-- database read and sorted all rows of a tenant for each page.

CREATE INDEX batch_file_listed ON batch_file (tenant_id, created_at, file_id);
CREATE INDEX batch_file_listed_by_purpose ON batch_file (tenant_id, purpose, created_at, file_id);
DROP INDEX batch_file_by_tenant;

CREATE INDEX batch_listed ON batch (tenant_id, created_at, batch_id);
DROP INDEX batch_by_tenant;
