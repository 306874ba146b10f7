"""What ordinary programs do: small programs that are dumped, restored twice and left running."""
