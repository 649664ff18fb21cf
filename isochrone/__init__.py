"""What the three services share: what they say to one another, and what each is made of."""
