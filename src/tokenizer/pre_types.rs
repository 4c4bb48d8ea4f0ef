//! How a GGUF file's `tokenizer.ggml.pre` splits text before byte-pair merging.
//!
//! Each name stands for a list of regular expressions; each in turn cuts what the ones before left into matches and
//! the text between them. Names and expressions are facts of llama.cpp's file format. Names that need more than
//! expressions (own digit or Han handling, unescaped vocabularies) are not attempted, and so refused.

/// What a name means.
pub(super) struct PreType {
    pub regexes: &'static [&'static str],
    /// A piece that is a token as it stands is not split and merged.
    pub ignores_merges: bool,
    /// Begin-of-sequence is added unless the file says otherwise.
    pub adds_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

macro_rules! contractions {
    () => {
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    };
}

/// The GPT-4 shape: any contraction case, words with one leading sign, digits as given, line breaks with spaces.
macro_rules! gpt4 {
    ($digits:literal) => {
        concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

/// The GPT-4o shape: words break where upper case follows lower case. Only ASCII case counts.
macro_rules! gpt4o {
    ($suffix:expr, $digits:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
            $suffix,
            r"|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
            $suffix,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const LLAMA3: &str = gpt4!(r"\p{N}{1,3}");
const QWEN2: &str = gpt4!(r"\p{N}");
const QWEN35: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const BAILING: &str = concat!(
    "'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
);
const SEED_CODER: &str =
    concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+");
const EXAONE_MOE: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
);
const DEEPSEEK3_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const BLOOM: &str = " ?[^(\\s|.,!?…。，、।۔،)]+";

/// The meaning of `name`; `None` for names that are unknown or not attempted.
pub(super) fn pre_type(name: &str) -> Option<PreType> {
    let plain = |regexes| Some(PreType { regexes, ignores_merges: false, adds_bos: false });
    let with_bos = |regexes| Some(PreType { regexes, ignores_merges: true, adds_bos: true });
    match name {
        "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            with_bos(&[LLAMA3])
        }
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "gigachat" | "a.x-4.0" | "mellum"
        | "modern-bert" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4" => plain(&[GPT2]),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            plain(&[r"\p{N}", GPT2])
        }
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan" | "solar-open"
        | "grok-2" => plain(&[QWEN2]),
        "qwen35" => plain(&[QWEN35]),
        "deepseek-coder" => plain(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", r"\p{N}"]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
            plain(&[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3_WORDS])
        }
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
        "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[BLOOM]),
        "viking" => plain(&[BLOOM, r"\p{N}"]),
        "tekken" => with_bos(&[gpt4o!("", r"\p{N}")]),
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" => {
            plain(&[gpt4o!(concat!(contractions!(), "?"), r"\p{N}{1,3}")])
        }
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[BAILING]),
        "seed-coder" => plain(&[SEED_CODER]),
        "exaone-moe" => plain(&[EXAONE_MOE]),
        _ => None,
    }
}
