"""Writing a checkpoint as one GGUF file that llama.cpp runs.

``layout`` chooses llama.cpp's architecture and makes the tensors, ``metadata`` states sizes and rotary positions,
``tokenizer`` the vocabulary, and ``write`` puts the file together. A family's file defines its layout
(``Family.gguf``).
"""
