"""What the recorded run of the browser tests is asked: four prompts, one of them hostile."""

#: What closes a script, opens an element and asks for a file, if anybody takes it for markup.
HOSTILE = "</script><img src=x onerror=alert(1)>"
PROMPTS = ("for i in range(", HOSTILE, "if not isinstance(", "raise TypeError(")
NEW_TOKENS = 16  # each: 64 together
