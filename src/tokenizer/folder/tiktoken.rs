//! Files of tiktoken ranks: a line for each token, its bytes in base64 and its rank, which is its id.

use super::{byte_chars, spelled};
use crate::tokenizer::TokenizerError;
use rustc_hash::FxHashMap;

/// The file's first line is base64, a space and a number.
pub fn is_ranks(bytes: &[u8]) -> bool {
    let line = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return false };
    line.trim_end().split_once(' ').is_some_and(|(text, rank)| decoded(text).is_some() && rank.parse::<u32>().is_ok())
}

/// Tokens by rank, and the merges that lead to them.
pub fn read(file: &'static str, bytes: &[u8]) -> Result<(Vec<String>, Vec<String>), TokenizerError> {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Err(TokenizerError::bad(file, "it is not UTF-8"));
    };
    let mut tokens: Vec<Vec<u8>> = Vec::new();
    for (number, line) in text.lines().filter(|line| !line.trim().is_empty()).enumerate() {
        let fault = |what: &str| TokenizerError::bad(file, format!("line {} {what}", number + 1));
        let (token, rank) = line.trim().split_once(' ').ok_or_else(|| fault("has no rank"))?;
        if rank.parse() != Ok(number) {
            return Err(fault(&format!("has rank {rank}; ranks count from 0")));
        }
        tokens.push(decoded(token).filter(|bytes| !bytes.is_empty()).ok_or_else(|| fault("is not base64"))?);
    }
    let chars = byte_chars();
    let merges = merges(&tokens)
        .into_iter()
        .map(|(left, right)| format!("{} {}", spelled(left, &chars), spelled(right, &chars)));
    let merges = merges.collect();
    Ok((tokens.iter().map(|token| spelled(token, &chars)).collect(), merges))
}

/// For each token, the two tokens that it is merged from when only those of lower rank exist.
fn merges(tokens: &[Vec<u8>]) -> Vec<(&[u8], &[u8])> {
    let ranks: FxHashMap<&[u8], u32> = tokens.iter().enumerate().map(|(rank, t)| (t.as_slice(), rank as u32)).collect();
    let mut merges = Vec::with_capacity(tokens.len());
    for (rank, token) in tokens.iter().enumerate() {
        let mut cuts: Vec<usize> = (0..=token.len()).collect();
        // Merges the best pair until two parts are left; pairs of this rank or more do not exist yet.
        while cuts.len() > 3 {
            let pairs = cuts
                .windows(3)
                .enumerate()
                .filter_map(|(i, w)| ranks.get(&token[w[0]..w[2]]).filter(|r| (**r as usize) < rank).map(|r| (*r, i)));
            let Some((_, best)) = pairs.min() else { break };
            cuts.remove(best + 1);
        }
        if let [from, middle, to] = cuts[..] {
            merges.push((&token[from..middle], &token[middle..to]));
        }
    }
    merges
}

/// Base64 with padding; `None` for anything else.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(digits.len() * 3 / 4);
    let (mut bits, mut count) = (0u32, 0);
    for b in digits.bytes() {
        let digit = match b {
            b'A'..=b'Z' => b - b'A',
            b'a'..=b'z' => b - b'a' + 26,
            b'0'..=b'9' => b - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_strictly() {
        assert_eq!(decoded("aGVsbG8="), Some(b"hello".to_vec()));
        assert_eq!(decoded("/+8="), Some(vec![0xff, 0xef]));
        assert_eq!((decoded("a"), decoded("a=b="), decoded("a b=")), (None, None, None));
    }

    #[test]
    fn merges_are_recovered_from_ranks() {
        let tokens: Vec<Vec<u8>> = ["a", "b", "c", "ab", "abc", "cab"].iter().map(|t| t.as_bytes().to_vec()).collect();
        let found: Vec<(&[u8], &[u8])> = merges(&tokens);
        let want: [(&[u8], &[u8]); 3] = [(b"a", b"b"), (b"ab", b"c"), (b"c", b"ab")];
        assert_eq!(found, want);
    }

    #[test]
    fn broken_ranks_are_named() {
        assert!(is_ranks(b"YQ== 0\nYg== 1\n") && !is_ranks(b"\x0a\x0e\x0a\x05<unk>"));
        let text = read("x", b"YQ== 0\nYg== 2\n").expect_err("a gap").to_string();
        assert_eq!(text, "x: line 2 has rank 2; ranks count from 0");
    }
}
