"""Identity and confinement: certificates, TLS, signatures, Landlock."""
