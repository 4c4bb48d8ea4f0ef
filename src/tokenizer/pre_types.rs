//! How a GGUF file's `tokenizer.ggml.pre` splits text before byte-pair merging.
//!
//! Each name stands for a list of regular expressions; each in turn cuts what the ones before left into matches and
//! the text between them. Names and expressions are facts of llama.cpp's file format; where it approximates what a model's
//! own tokenizer says (`kimi-k2`, `afmoe`), the model's expression stands here.

/// What a name means.
pub(super) struct PreType {
    pub regexes: &'static [&'static str],
    /// A piece that is a token as it stands is not split and merged.
    pub ignores_merges: bool,
    /// Begin-of-sequence is added unless the file says otherwise.
    pub adds_bos: bool,
    pub spelling: Spelling,
    /// Runs of line breaks that are tokens as they stand are not merged.
    pub whole_newlines: bool,
}

/// How tokens are written down.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Bytes in GPT-2's characters.
    ByteLevel,
    /// Text with `▁` for spaces, and byte tokens for the rest.
    SentencePiece,
    /// Text as it is; what has no token is left out, as are the spaces between words.
    Plain,
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
const SPARK_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
);
const CJK: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";

/// Upper and lower case by Unicode's categories; letters without case and marks go with both.
macro_rules! cased {
    ($without:literal, $suffix:expr, $digits:literal, $signs:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
            $without,
            r"]*[\p{Ll}\p{Lm}\p{Lo}\p{M}",
            $without,
            "]+",
            $suffix,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
            $without,
            r"]+[\p{Ll}\p{Lm}\p{Lo}\p{M}",
            $without,
            "]*",
            $suffix,
            "|",
            $digits,
            "|",
            $signs,
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}

const YOUTU: &str = cased!("", concat!(contractions!(), "?"), r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*");
const TINY_AYA: &str = cased!("", concat!(contractions!(), "?"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*");
const KIMI: &str = concat!(
    r"\p{Han}+|",
    cased!(r"&&[^\p{Han}]", concat!(contractions!(), "?"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*")
);
const GRANITE_MULTI: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]*[[\p{L}\p{M}]&&[^A-Z]]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]+[[\p{L}\p{M}]&&[^A-Z]]*",
    contractions!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const JAIS2: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)",
    r"|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
);
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Asian scripts that `afmoe` keeps apart.
const ASIAN: &str = concat!(
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{309f}\x{30a0}-\x{30ff}\x{ff65}-\x{ff9f}",
    r"\x{2f00}-\x{2fdf}\x{e40}-\x{e7f}\x{ec0}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}",
    r"\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
);
/// Letters with case, as the tokenizer of DeepSeek's first models lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ",
    r"ὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ",
    r"Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
);
const WORDS: &str = r"\S+";
const LINES: &str = r"[^\n]+|[\n]+";
/// One to three digits with a multiple of three behind them.
const THREES: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";
const BLOOM: &str = " ?[^(\\s|.,!?…。，、।۔،)]+";

/// The meaning of `name`; `None` for names that are unknown or not attempted.
pub(super) fn pre_type(name: &str) -> Option<PreType> {
    const PLAIN: PreType = PreType {
        regexes: &[],
        ignores_merges: false,
        adds_bos: false,
        spelling: Spelling::ByteLevel,
        whole_newlines: false,
    };
    let plain = |regexes| Some(PreType { regexes, ..PLAIN });
    let with_bos = |regexes| Some(PreType { regexes, ignores_merges: true, adds_bos: true, ..PLAIN });
    let whole = |regexes| Some(PreType { regexes, ignores_merges: true, ..PLAIN });
    match name {
        "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "jina-v5-nano" => with_bos(&[LLAMA3]),
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "gigachat" | "a.x-4.0" | "mellum"
        | "modern-bert" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4" | "jina-v1-en"
        | "jina-v2-code" | "roberta-bpe" => plain(&[GPT2]),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            plain(&[r"\p{N}", GPT2])
        }
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan" | "solar-open"
        | "grok-2" => plain(&[QWEN2]),
        "qwen35" => plain(&[QWEN35]),
        "deepseek-coder" => plain(&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\u{d7ff}]+", r"\p{N}"]),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => plain(&[r"\p{N}{1,3}", CJK, DEEPSEEK3_WORDS]),
        "spark2_5" => plain(&[r"\p{N}{1,3}", CJK, SPARK_WORDS, r"\p{N}"]),
        "deepseek-llm" => plain(&[
            "[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\u{d7ff}]+",
            r"\p{N}+",
        ]),
        "youtu" => whole(&["[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u{3040}-ゟ゠-ヿ]+", YOUTU]),
        "minicpm5" => whole(&[r"\p{N}{1,3}", gpt4!(r"\p{N}+")]),
        "jais-2" => plain(&[JAIS2]),
        "granite-embed-multi-97m" => whole(&[GRANITE_MULTI]),
        "tiny_aya" | "cohere2moe" => plain(&[r"\d{1,3}(?=(?:\d{3})*\b)", TINY_AYA]),
        "superbpe" => plain(&[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
        "chameleon" => Some(PreType {
            regexes: &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                "([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ],
            adds_bos: true,
            ..PLAIN
        }),
        "kimi-k2" => plain(&[KIMI]),
        "ufakzeka" => plain(&[UFAKZEKA]),
        "afmoe" => plain(&[THREES, ASIAN, DEEPSEEK3_WORDS]),
        "laguna" => plain(&[LINES, QWEN2]),
        "gemma4" | "granite-embed-multi-311m" => Some(PreType {
            regexes: &[LINES],
            adds_bos: true,
            spelling: Spelling::SentencePiece,
            whole_newlines: true,
            ..PLAIN
        }),
        "sarvam-moe" => Some(PreType { regexes: &[LINES], spelling: Spelling::SentencePiece, ..PLAIN }),
        "whitespace" => Some(PreType { regexes: &[WORDS], spelling: Spelling::Plain, ..PLAIN }),
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
        "poro-chat" | "bloom" | "gpt3-finnish" => plain(&[BLOOM]),
        "viking" => plain(&[BLOOM, r"\p{N}"]),
        "tekken" => with_bos(&[gpt4o!("", r"\p{N}")]),
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" | "talkie" => {
            plain(&[gpt4o!(concat!(contractions!(), "?"), r"\p{N}{1,3}")])
        }
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[BAILING]),
        "seed-coder" => plain(&[SEED_CODER]),
        "exaone-moe" => plain(&[EXAONE_MOE]),
        _ => None,
    }
}
