//! SentencePiece's `tokenizer.model`: a protocol buffer with the pieces, the kind of model and its normaliser.
//! Fields as in `sentencepiece_model.proto`; those that do not change the ids of BPE and unigram models are skipped.

use super::empty;
use crate::ids::TokenId;
use crate::tokenizer::{GgufVocab, TokenizerError};

const FILE: &str = "tokenizer.model";

/// A field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed(u32),
}

/// Reads a message's fields in order.
struct Message<'a>(&'a [u8]);

impl<'a> Message<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for i in 0..10 {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 127).checked_shl(7 * i)?;
            if byte & 128 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.varint()?;
        let field = match key & 7 {
            0 => Field::Number(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Number(0)
            }
            2 => {
                let len = self.varint()?;
                Field::Bytes(self.take(usize::try_from(len).ok()?)?)
            }
            5 => Field::Fixed(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, field))
    }

    /// Calls `read` for each field; false for what is no message.
    fn each(mut self, mut read: impl FnMut(u64, Field<'a>)) -> bool {
        while !self.0.is_empty() {
            match self.field() {
                Some((number, field)) => read(number, field),
                None => return false,
            }
        }
        true
    }
}

/// What is read of the trainer's and the normaliser's settings.
struct Settings {
    model_type: u64,
    unk: i64,
    bos: i64,
    eos: i64,
    pad: i64,
    char_map: Vec<u8>,
    escapes_spaces: bool,
    spaces_end_words: bool,
    add_space_prefix: bool,
    remove_extra_spaces: bool,
}

pub fn read(bytes: &[u8]) -> Result<GgufVocab, TokenizerError> {
    let mut vocab = empty("llama");
    let mut settings = Settings {
        model_type: 1,
        unk: 0,
        bos: 1,
        eos: 2,
        pad: -1,
        char_map: Vec::new(),
        escapes_spaces: true,
        spaces_end_words: false,
        add_space_prefix: true,
        remove_extra_spaces: true,
    };
    let mut is_whole = true;
    let is_message = Message(bytes).each(|number, field| match (number, field) {
        (1, Field::Bytes(piece)) => is_whole &= read_piece(piece, &mut vocab),
        (2, Field::Bytes(trainer)) => is_whole &= read_trainer(trainer, &mut settings),
        (3, Field::Bytes(normalizer)) => is_whole &= read_normalizer(normalizer, &mut settings),
        _ => {}
    });
    if !is_message || !is_whole || vocab.tokens.is_empty() {
        return Err(TokenizerError::bad(FILE, "it is not a SentencePiece model"));
    }
    let unsupported = |what, name: &str| Err(TokenizerError::Unsupported { file: FILE, what, name: name.to_owned() });
    match settings.model_type {
        1 => vocab.model = "t5".into(),
        2 => {}
        3 => return unsupported("the model type", "word"),
        4 => return unsupported("the model type", "char"),
        other => return unsupported("the model type", &other.to_string()),
    }
    if !settings.escapes_spaces {
        return unsupported("the normaliser", "escape_whitespaces = false");
    }
    if settings.spaces_end_words {
        return unsupported("the trainer's", "treat_whitespace_as_suffix");
    }
    let num_tokens = vocab.tokens.len() as i64;
    let id = |id: i64| (0..num_tokens).contains(&id).then_some(id as TokenId);
    (vocab.unk, vocab.bos, vocab.eos, vocab.pad) =
        (id(settings.unk), id(settings.bos), id(settings.eos), id(settings.pad));
    vocab.add_space_prefix = Some(settings.add_space_prefix);
    vocab.remove_extra_spaces = Some(settings.remove_extra_spaces);
    vocab.char_map = settings.char_map;
    if vocab.model == "t5" {
        // Begin and end are added where the tokenizer's config says so.
        (vocab.add_bos, vocab.add_eos) = (Some(false), Some(false));
    }
    Ok(vocab)
}

fn read_piece(bytes: &[u8], vocab: &mut GgufVocab) -> bool {
    let (mut text, mut score, mut kind) = (None, 0.0, 1);
    let is_message = Message(bytes).each(|number, field| match (number, field) {
        (1, Field::Bytes(bytes)) => text = std::str::from_utf8(bytes).ok(),
        (2, Field::Fixed(bits)) => score = f32::from_bits(bits),
        (3, Field::Number(number)) => kind = number,
        _ => {}
    });
    let Some(text) = text.filter(|_| is_message && (1..=6).contains(&kind)) else { return false };
    vocab.tokens.push(text.to_owned());
    vocab.scores.push(score);
    vocab.token_types.push(kind as i32);
    true
}

fn read_trainer(bytes: &[u8], settings: &mut Settings) -> bool {
    Message(bytes).each(|number, field| {
        let Field::Number(value) = field else { return };
        match number {
            3 => settings.model_type = value,
            24 => settings.spaces_end_words = value != 0,
            40 => settings.unk = i64::from(value as i32),
            41 => settings.bos = i64::from(value as i32),
            42 => settings.eos = i64::from(value as i32),
            43 => settings.pad = i64::from(value as i32),
            _ => {}
        }
    })
}

fn read_normalizer(bytes: &[u8], settings: &mut Settings) -> bool {
    Message(bytes).each(|number, field| match (number, field) {
        (2, Field::Bytes(map)) => settings.char_map = map.to_vec(),
        (3, Field::Number(value)) => settings.add_space_prefix = value != 0,
        (4, Field::Number(value)) => settings.remove_extra_spaces = value != 0,
        (5, Field::Number(value)) => settings.escapes_spaces = value != 0,
        _ => {}
    })
}
