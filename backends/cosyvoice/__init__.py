"""CosyVoice 3: text to speech tokens on llama.cpp, tokens to audio on torch."""
