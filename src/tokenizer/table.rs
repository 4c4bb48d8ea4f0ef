//! The bytes of every token, in one flat array.
//!
//! Guarantees: looking up an id never fails and never allocates; ids outside the vocabulary have no bytes.
//! Memory is bounded by the vocabulary: an id far beyond the number of tokens is refused.

use super::TokenizerError;
use crate::ids::TokenId;

/// Bytes of token i: `bytes[ends[i - 1]..ends[i]]`.
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    ends: Vec<u32>,        // [vocab]
    is_special: Vec<bool>, // [vocab]
    strips_first_space: bool,
}

/// One token on its way into the table.
pub(super) struct Entry {
    pub id: TokenId,
    pub bytes: Vec<u8>,
    pub is_special: bool,
}

impl TokenTable {
    /// `strips_first_space`: a text's first space belongs to the encoding and not to the text.
    pub fn new(
        file: &'static str,
        mut entries: Vec<Entry>,
        strips_first_space: bool,
    ) -> Result<TokenTable, TokenizerError> {
        entries.sort_by(|a, b| (a.id, &a.bytes).cmp(&(b.id, &b.bytes)));
        let num_tokens = entries.len();
        let largest = entries.last().map_or(0, |e| e.id);
        if is_far_beyond(largest.into(), num_tokens) {
            return Err(far_beyond(file, largest.into(), num_tokens));
        }
        let total: usize = entries.iter().map(|e| e.bytes.len()).sum();
        if u32::try_from(total).is_err() {
            return Err(TokenizerError::bad(file, format!("the tokens have {total} bytes")));
        }
        let mut table = TokenTable {
            bytes: Vec::with_capacity(total),
            ends: Vec::with_capacity(num_tokens),
            is_special: Vec::with_capacity(num_tokens),
            strips_first_space,
        };
        for entry in entries {
            // Ids without a token get no bytes; of two tokens with one id the later one wins.
            table.ends.resize(entry.id as usize, table.bytes.len() as u32);
            table.is_special.resize(entry.id as usize, false);
            let start = table.ends.last().copied().unwrap_or(0);
            table.bytes.truncate(start as usize);
            table.bytes.extend_from_slice(&entry.bytes);
            table.ends.push(table.bytes.len() as u32);
            table.is_special.push(entry.is_special);
        }
        Ok(table)
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn bytes(&self, token: TokenId) -> &[u8] {
        let idx = token as usize;
        match self.ends.get(idx) {
            None => &[],
            Some(&end) => {
                let start = if idx == 0 { 0 } else { self.ends[idx - 1] };
                &self.bytes[start as usize..end as usize]
            }
        }
    }

    pub fn is_special(&self, token: TokenId) -> bool {
        self.is_special.get(token as usize).copied().unwrap_or(false)
    }

    pub fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// Whether a table of so few tokens must not be made as long as this id asks for.
pub(super) fn is_far_beyond(id: u64, num_tokens: usize) -> bool {
    id > (num_tokens as u64).saturating_mul(4).saturating_add(65_536)
}

pub(super) fn far_beyond(file: &'static str, id: u64, num_tokens: usize) -> TokenizerError {
    TokenizerError::bad(file, format!("token id {id} is far beyond the {num_tokens} tokens"))
}

/// The byte that a character stands for in byte-level vocabularies (GPT-2's table): printable Latin-1 stands for
/// itself, the other 68 bytes follow from U+0100 on.
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes of a byte-level token; characters outside the table stand for themselves.
pub(super) fn byte_level_bytes(token: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for c in token.chars() {
        match byte_of_char(c) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

/// The bytes of a SentencePiece token: `▁` is a space.
pub(super) fn sentencepiece_bytes(token: &str) -> Vec<u8> {
    token.replace('▁', " ").into_bytes()
}

/// The byte of a token spelled `<0xE2>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // The digits are checked one by one, since the parser would take a sign.
    let is_byte = hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    if is_byte { u8::from_str_radix(hex, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: TokenId, text: &str) -> Entry {
        Entry { id, bytes: text.into(), is_special: text.starts_with('<') }
    }

    #[test]
    fn every_byte_has_exactly_one_character() {
        let mut seen = [0u32; 256];
        for c in (0..0x200).filter_map(char::from_u32) {
            if let Some(byte) = byte_of_char(c) {
                seen[byte as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!(byte_level_bytes("ĠHiĊ"), b" Hi\n");
        assert_eq!(byte_level_bytes("漢"), "漢".as_bytes());
    }

    #[test]
    fn holes_and_ids_beyond_the_end_have_no_bytes() {
        let table = TokenTable::new("x", vec![entry(3, "<s>"), entry(0, "ab")], false).expect("valid");
        assert_eq!((table.len(), table.bytes(0), table.bytes(3)), (4, &b"ab"[..], &b"<s>"[..]));
        assert_eq!((table.bytes(1), table.bytes(4), table.bytes(u32::MAX)), (&b""[..], &b""[..], &b""[..]));
        assert!(table.is_special(3) && !table.is_special(0) && !table.is_special(9));
    }

    #[test]
    fn an_absurd_id_is_refused_before_memory_is_taken() {
        assert!(TokenTable::new("x", vec![entry(u32::MAX, "a")], false).is_err());
    }

    #[test]
    fn byte_tokens_are_exactly_two_hex_digits() {
        assert_eq!(byte_token("<0xE2>"), Some(0xe2));
        for other in ["<0xE>", "<0xE22>", "<0xGG>", "0xE2", "<0x+1>"] {
            assert_eq!(byte_token(other), None, "{other}");
        }
    }
}
