"""The server of the target model: it alone decides tokens. It imports no other service."""
