"""One server: makes what runs become what is assigned."""
