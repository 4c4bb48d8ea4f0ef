//! Text to tokens and back: encoding, GGUF vocabularies, chat templates, incremental detokenizing.
