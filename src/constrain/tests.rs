//! Grammars over a vocabulary of bytes.

use super::*;
use crate::tokenizer::GgufVocab;

const EOS: TokenId = 256;

/// Tokens 0 to 255 are the bytes; byte-level vocabularies write them as characters of their own.
fn tokenizer() -> Arc<Tokenizer> {
    let is_plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let byte_char = |byte: u8| match is_plain(byte) {
        true => byte as char,
        false => char::from_u32(0x100 + (0..byte).filter(|&b| !is_plain(b)).count() as u32).unwrap(),
    };
    let mut tokens: Vec<String> = (0..=255u8).map(|b| byte_char(b).to_string()).collect();
    tokens.push("<|end|>".into());
    let mut token_types = vec![1; tokens.len()];
    token_types[EOS as usize] = 3;
    let vocab = GgufVocab {
        model: "gpt2".into(),
        pre: None,
        tokens,
        scores: Vec::new(),
        token_types,
        merges: Vec::new(),
        bos: None,
        eos: Some(EOS),
        unk: None,
        pad: None,
        add_bos: Some(false),
        add_eos: Some(false),
        add_space_prefix: None,
        ..GgufVocab::default()
    };
    Arc::new(Tokenizer::from_gguf(vocab).unwrap())
}

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(&tokenizer(), 257, &[EOS]).unwrap()
}

/// Whether a grammar allows a text and its end, and whether it may end nowhere before.
fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut constraint = compiler().compile(grammar).unwrap();
    let output: Vec<TokenId> = text.bytes().map(TokenId::from).chain([EOS]).collect();
    let mut mask = vec![0u32; 257usize.div_ceil(32)];
    (0..output.len()).all(|i| {
        constraint.allow(&output[..i], &mut mask).unwrap();
        mask[(output[i] / 32) as usize] >> (output[i] % 32) & 1 == 1
    })
}

/// With what the two notations write differently.
fn gbnf() -> Grammar {
    let text = "root ::= object | none-such | \"\"\n\nobject ::= \"{ \" [\\x22] key-name \"\\\": \" [0-9]{1,3} \" }\" # object\n\
                key-name ::= [a-zA-Z_-]+\nnone-such ::= (\"none\" \"/\"\n) []^-]{2}";
    Grammar::Lark(text.replace("[]^-]", "[\\]^-]"))
}

#[test]
fn grammars_allow_their_texts_and_no_others() {
    let schema = json!({
        "type": "object", "properties": { "age": { "type": "integer" } }, "required": ["age"],
        "additionalProperties": false,
    });
    let table = [
        (Grammar::JsonObject, r#"{"a": [1, null, "x"]}"#, true),
        (Grammar::JsonObject, "[1]", false),
        (Grammar::JsonObject, "{\"a\"", false),
        (Grammar::JsonSchema(schema.clone()), r#"{"age": 12}"#, true),
        (Grammar::JsonSchema(schema.clone()), "{\n  \"age\": 12\n}", true),
        (Grammar::JsonSchema(schema.clone()), r#"{"age": "12"}"#, false),
        (Grammar::JsonSchema(schema), "{}", false),
        (Grammar::Regex("[0-9]{2}-ß+".into()), "12-ßß", true),
        (Grammar::Regex("[0-9]{2}".into()), "123", false),
        (Grammar::Choice(vec!["yes".into(), "no \"way\"".into()]), "no \"way\"", true),
        (Grammar::Choice(vec!["yes".into(), "no".into()]), "ye", false),
        (Grammar::Lark("start: \"a\" b+\nb: \"b\"".into()), "abb", true),
        (Grammar::Lark("start: \"a\" b+\nb: \"b\"".into()), "a", false),
        (gbnf(), "{ \"a-b\": 12 }", true),
        (gbnf(), "{ \"a-b\": 1234 }", false),
        (gbnf(), "{ \"\u{e9}\": 1 }", false),
        (gbnf(), "none/]^", true),
        (gbnf(), "", true),
    ];
    for (grammar, text, want) in table {
        assert_eq!(accepts(&grammar, text), want, "{grammar:?} {text}");
    }
}

#[test]
fn forks_start_anew_and_the_cache_gives_the_same() {
    let compiler = compiler();
    let grammar = Grammar::Choice(vec!["ab".into()]);
    let mut first = compiler.compile(&grammar).unwrap();
    let mut mask = vec![0u32; 9];
    first.allow(&[97], &mut mask).unwrap();
    assert_eq!(mask[3], 1 << (98 - 96));
    for mut other in [first.fork(), compiler.compile(&grammar).unwrap()] {
        other.allow(&[], &mut mask).unwrap();
        assert_eq!(mask[3], 1 << (97 - 96));
    }
    first.allow(&[97, 98], &mut mask).unwrap();
    assert_eq!(mask[8], 1, "only the end is left");
    first.allow(&[97, 98, EOS], &mut mask).unwrap();
    assert_eq!(mask[8], 1);
}

#[test]
fn faulty_grammars_are_refused_in_words() {
    let compiler = compiler();
    let error = |grammar: Grammar| compiler.compile(&grammar).err().expect("an error").to_string();
    assert!(!error(Grammar::Regex("(".into())).is_empty());
    assert!(!error(Grammar::Lark("start: x".into())).contains('\n'));
    assert!(error(Grammar::JsonSchema(json!({ "type": "nothing" }))).contains("nothing"));
    assert_eq!(error(Grammar::Choice(vec![])), "there is nothing to choose from");
    let large = Grammar::Regex("a".repeat(MAX_GRAMMAR_BYTES));
    assert!(matches!(compiler.compile(&large), Err(GrammarError::TooLarge { .. })));
    // Bounded in time: a counter of counters.
    let started = std::time::Instant::now();
    let _ = compiler.compile(&Grammar::Regex("(a{1,1000}){1,1000}".into()));
    assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
}

/// The output that a model would write which always takes the allowed token of the lowest id, with what is forced appended
/// or drawn one by one; and how many tokens were forced.
fn first_choice(constraint: &mut dyn TokenConstraint, jumps: bool) -> (Vec<TokenId>, usize) {
    let (mut output, mut num_forced) = (Vec::new(), 0);
    let mut mask = vec![0u32; 257usize.div_ceil(32)];
    while output.last() != Some(&EOS) {
        assert!(output.len() < 300, "{output:?}");
        constraint.allow(&output, &mut mask).unwrap();
        let lowest = (0..257).find(|token| mask[(token / 32) as usize] >> (token % 32) & 1 == 1);
        output.push(lowest.expect("an allowed token"));
        if jumps && output.last() != Some(&EOS) {
            let forced = constraint.forced(&output).unwrap();
            num_forced += forced.len();
            output.extend(forced);
        }
    }
    (output, num_forced)
}

#[test]
fn forced_tokens_are_those_that_masks_would_leave() {
    let schema = json!({
        "type": "object", "required": ["a_long_name", "kind"], "additionalProperties": false,
        "properties": { "a_long_name": { "enum": ["first_value", "second"] }, "kind": { "const": "weather" } },
    });
    let grammars = [
        (Grammar::JsonSchema(schema), 30),
        (Grammar::Choice(vec!["one of them".into(), "one or two".into()]), 8),
        (Grammar::Regex("[ab]cdefgh[0-9]ijkl".into()), 10),
        (Grammar::Regex("[a-c]{3}".into()), 0),
    ];
    for (grammar, least) in grammars {
        let constraint = compiler().compile(&grammar).unwrap();
        let (plain, none) = first_choice(&mut *constraint.fork(), false);
        let (jumped, num_forced) = first_choice(&mut *constraint.fork(), true);
        assert_eq!(jumped, plain, "{grammar:?}");
        assert!(none == 0 && num_forced >= least, "{num_forced} of {grammar:?}");
        // Only the end is left once the last choice was made.
        assert_eq!(plain.last(), Some(&EOS));
    }
}

#[test]
fn an_output_that_leaves_what_is_forced_is_refused() {
    let mut constraint = compiler().compile(&Grammar::Choice(vec!["abc".into()])).unwrap();
    assert_eq!(constraint.forced(&[]).unwrap(), [97, 98, 99, EOS]);
    assert!(constraint.forced(&[97, 97]).is_err());
}
