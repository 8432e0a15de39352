"""In place of tiktoken for llm.c, which downloads a vocabulary that it uses only to sample text."""


def get_encoding(_name: str) -> None:
    return None
