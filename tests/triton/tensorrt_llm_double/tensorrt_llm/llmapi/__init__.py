"""Part of the test double of tensorrt_llm."""
