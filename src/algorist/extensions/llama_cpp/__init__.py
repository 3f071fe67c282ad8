"""llama.cpp: GGUF files written of a trained model (``write.py``) and verified by llama.cpp itself (``verify.py``)."""
