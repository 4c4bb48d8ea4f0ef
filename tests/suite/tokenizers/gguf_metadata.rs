//! A tiny reader of GGUF metadata, so that the tokenizer's tests do not hang on the model loader. Trusts its input.

use kvasir::tokenizer::GgufVocab;
use std::collections::HashMap;

pub enum Item {
    Number(f64),
    Text(String),
    Numbers(Vec<f64>),
    Texts(Vec<String>),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, len: usize) -> &[u8] {
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("4 bytes"))
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("8 bytes"))
    }
    fn text(&mut self) -> String {
        let len = self.u64() as usize;
        String::from_utf8(self.take(len).to_vec()).expect("UTF-8")
    }
    fn number(&mut self, kind: u32) -> f64 {
        match kind {
            0 | 7 => f64::from(self.take(1)[0]),
            1 => f64::from(self.take(1)[0] as i8),
            4 => f64::from(self.u32()),
            5 => f64::from(self.u32() as i32),
            6 => f64::from(f32::from_bits(self.u32())),
            10 => self.u64() as f64,
            other => panic!("type {other} is not used by these files"),
        }
    }
    fn item(&mut self) -> Item {
        match self.u32() {
            8 => Item::Text(self.text()),
            9 => {
                let (kind, len) = (self.u32(), self.u64());
                match kind {
                    8 => Item::Texts((0..len).map(|_| self.text()).collect()),
                    _ => Item::Numbers((0..len).map(|_| self.number(kind)).collect()),
                }
            }
            kind => Item::Number(self.number(kind)),
        }
    }
}

pub fn vocab(path: &std::path::Path) -> GgufVocab {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut reader = Reader(&bytes);
    assert_eq!(reader.take(4), b"GGUF");
    let (_version, _tensors, num_keys) = (reader.u32(), reader.u64(), reader.u64());
    let mut items: HashMap<String, Item> = (0..num_keys).map(|_| (reader.text(), reader.item())).collect();
    let mut take = |key: &str| items.remove(&format!("tokenizer.ggml.{key}"));
    let text = |item: Option<Item>| match item {
        Some(Item::Text(text)) => Some(text),
        _ => None,
    };
    let texts = |item: Option<Item>| match item {
        Some(Item::Texts(texts)) => texts,
        _ => Vec::new(),
    };
    let numbers = |item: Option<Item>| match item {
        Some(Item::Numbers(numbers)) => numbers,
        _ => Vec::new(),
    };
    let number = |item: Option<Item>| match item {
        Some(Item::Number(number)) => Some(number),
        _ => None,
    };
    GgufVocab {
        model: text(take("model")).expect("tokenizer.ggml.model"),
        pre: text(take("pre")),
        tokens: texts(take("tokens")),
        scores: numbers(take("scores")).into_iter().map(|n| n as f32).collect(),
        token_types: numbers(take("token_type")).into_iter().map(|n| n as i32).collect(),
        merges: texts(take("merges")),
        bos: number(take("bos_token_id")).map(|n| n as u32),
        eos: number(take("eos_token_id")).map(|n| n as u32),
        unk: number(take("unknown_token_id")).map(|n| n as u32),
        pad: number(take("padding_token_id")).map(|n| n as u32),
        add_bos: number(take("add_bos_token")).map(|n| n != 0.0),
        add_eos: number(take("add_eos_token")).map(|n| n != 0.0),
        add_space_prefix: number(take("add_space_prefix")).map(|n| n != 0.0),
        ..GgufVocab::default()
    }
}
