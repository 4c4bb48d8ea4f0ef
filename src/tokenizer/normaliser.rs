//! SentencePiece's normalisation: a map of character sequences, spaces as `▁`, and which spaces are added or dropped.
//!
//! Guarantees: the text that SentencePiece's own normaliser makes of a text without user-defined symbols, in time linear
//! in its length. A map whose entries point outside of it matches nothing there.

use super::TokenizerError;

const SPACE: char = '▁';

/// What is done to a text before it is cut into pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct Normaliser {
    pub map: CharMap,
    /// A space is put before the text.
    pub adds_prefix: bool,
    /// Runs of spaces become one, those at both ends none.
    pub removes_extra_spaces: bool,
}

impl Normaliser {
    /// The text as pieces spell it. Empty for no text.
    pub fn normalise(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 3);
        let mut rest = text;
        if self.removes_extra_spaces {
            while let Some((" ", len)) = self.map.first(rest) {
                rest = &rest[len..];
            }
        }
        if rest.is_empty() {
            return out;
        }
        if self.adds_prefix {
            out.push(SPACE);
        }
        let mut is_after_space = self.removes_extra_spaces;
        while let Some((mut piece, len)) = self.map.first(rest) {
            rest = &rest[len..];
            if is_after_space {
                piece = piece.trim_start_matches(' ');
            }
            if !piece.is_empty() {
                out.extend(piece.chars().map(|c| if c == ' ' { SPACE } else { c }));
                is_after_space = self.removes_extra_spaces && piece.ends_with(' ');
            }
        }
        if self.removes_extra_spaces {
            let len = out.trim_end_matches(SPACE).len();
            out.truncate(len);
        }
        out
    }
}

/// Sequences of characters and what replaces them: a double array (each unit has the offset of its children, the byte
/// that leads to it, and whether a value hangs on it), then the replacements, each ended by a zero byte.
#[derive(Clone, Debug, Default)]
pub(super) struct CharMap {
    units: Vec<u32>,
    replacements: String,
}

/// A unit's label is its byte; this bit is set in units that hold a value.
const IS_VALUE: u32 = 1 << 31;

fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

fn has_value(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

impl CharMap {
    /// Reads SentencePiece's `precompiled_charsmap`; no bytes are no map. `file` is named in errors.
    pub fn read(file: &'static str, bytes: &[u8]) -> Result<CharMap, TokenizerError> {
        if bytes.is_empty() {
            return Ok(CharMap::default());
        }
        let bad = |fault: &str| TokenizerError::bad(file, fault.to_owned());
        let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| bad("the character map has no size"))?;
        let (units, replacements) = rest
            .split_at_checked(u32::from_le_bytes(*size) as usize)
            .filter(|(units, _)| !units.is_empty() && units.len().is_multiple_of(4))
            .ok_or_else(|| bad("the character map is shorter than it says"))?;
        let units = units.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        if replacements.last() != Some(&0) {
            return Err(bad("the last replacement of the character map has no end"));
        }
        let replacements = String::from_utf8(replacements.to_vec())
            .map_err(|_| bad("the replacements of the character map are not UTF-8"))?;
        Ok(CharMap { units, replacements })
    }

    /// What stands at the start of a text, replaced by the longest entry that matches, and its bytes in the text. `None`
    /// at the end.
    fn first<'a>(&'a self, text: &'a str) -> Option<(&'a str, usize)> {
        let first = text.chars().next()?;
        Some(self.longest(text).unwrap_or((&text[..first.len_utf8()], first.len_utf8())))
    }

    fn longest<'a>(&'a self, text: &str) -> Option<(&'a str, usize)> {
        let mut best = None;
        let mut node = offset(*self.units.first()?);
        for (i, byte) in text.bytes().enumerate().take_while(|(_, byte)| *byte != 0) {
            node ^= u32::from(byte);
            let Some(&unit) = self.units.get(node as usize) else { break };
            if unit & (IS_VALUE | 0xff) != u32::from(byte) {
                break;
            }
            node ^= offset(unit);
            if has_value(unit)
                && let Some(value) = self.units.get(node as usize)
                && let Some(replacement) = self.replacement(value & !IS_VALUE)
                && text.is_char_boundary(i + 1)
            {
                best = Some((replacement, i + 1));
            }
        }
        best
    }

    fn replacement(&self, at: u32) -> Option<&str> {
        let rest = self.replacements.get(at as usize..)?;
        Some(&rest[..rest.find('\0')?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normaliser(adds_prefix: bool, removes_extra_spaces: bool) -> Normaliser {
        Normaliser { map: CharMap::default(), adds_prefix, removes_extra_spaces }
    }

    #[test]
    fn spaces_are_added_and_dropped_as_asked() {
        assert_eq!(normaliser(true, true).normalise("  a  b "), "▁a▁b");
        assert_eq!(normaliser(true, false).normalise(" a  b "), "▁▁a▁▁b▁");
        assert_eq!(normaliser(false, true).normalise(" a b"), "a▁b");
        assert_eq!(normaliser(false, false).normalise("a b"), "a▁b");
        assert_eq!(
            (normaliser(true, true).normalise("  "), normaliser(true, false).normalise("")),
            ("".into(), "".into())
        );
    }

    #[test]
    fn broken_maps_are_refused() {
        let read = |bytes: &[u8]| CharMap::read("map", bytes).map(|_| ());
        assert!(read(&[]).is_ok());
        for broken in [&[1][..], &[4, 0, 0, 0, 1], &[4, 0, 0, 0, 1, 2, 3, 4], &[4, 0, 0, 0, 1, 2, 3, 4, b'a']] {
            assert!(read(broken).is_err(), "{broken:?}");
        }
        assert!(read(&[4, 0, 0, 0, 1, 2, 3, 4, 0xff, 0]).is_err(), "not UTF-8");
        // A unit whose children lie beyond the end matches nothing.
        let map = CharMap::read("map", &[4, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f, 0]).expect("well-formed");
        assert_eq!(map.first("ab"), Some(("a", 1)));
    }
}
