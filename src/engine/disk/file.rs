//! One block's content as a file.
//!
//! Layout, little-endian: magic with the format's version (8 bytes), identity of model and format (32), block size (u32),
//! zero (u32), salt (u64), adapter (u64), chained hash (u64), content identity (32), parent's identity (32), length of the bytes (u64),
//! tokens (u32 each), the bytes of keys and values as the executor lays them out, and XXH3-64 over all of that.
//!
//! Guarantees: what [`decode`] gives is whole and unchanged, belongs to this model and format, and is what it was asked
//! for: checksum, identity, tokens and parent are all compared. Whatever else a file holds is refused with the reason.

use crate::ids::{HostSlot, TokenId};
use crate::kv::{CacheKey, CachedContent, ContentId};
use xxhash_rust::xxh3::xxh3_64;

/// Names the format; another version is another magic.
const MAGIC: [u8; 8] = *b"KVASIR\x01\n";
const HEADER_BYTES: usize = 8 + 32 + 4 + 4 + 8 + 8 + 8 + 32 + 32 + 8;
const CHECKSUM_BYTES: usize = 8;

/// What every file of a folder has in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Weights, adapter and storage of keys and values: content of another identity is not bit-equal.
    pub identity: [u8; 32],
    pub block_size: u32,
    /// Of keys and values.
    pub bytes_per_block: u64,
}

/// Why a file is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileFault {
    #[error("it is cut short: {found} bytes, a block has {expected}")]
    Truncated { found: usize, expected: usize },
    #[error("it is no block of a prefix cache, or of another version")]
    NotABlock,
    #[error("it belongs to another model, adapter or format")]
    Foreign,
    #[error("its checksum is wrong")]
    Corrupt,
    #[error("it holds other content than its name says")]
    OtherContent,
}

impl Format {
    /// Bytes of one file.
    pub fn file_bytes(&self) -> u64 {
        (HEADER_BYTES + CHECKSUM_BYTES) as u64 + 4 * u64::from(self.block_size) + self.bytes_per_block
    }
}

/// The file of a content; `bytes` are those of its block.
pub fn encode(format: &Format, content: &CachedContent, bytes: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(format.file_bytes() as usize);
    file.extend_from_slice(&MAGIC);
    file.extend_from_slice(&format.identity);
    file.extend_from_slice(&format.block_size.to_le_bytes());
    file.extend_from_slice(&0u32.to_le_bytes());
    file.extend_from_slice(&content.key.salt.to_le_bytes());
    file.extend_from_slice(&content.key.adapter.to_le_bytes());
    file.extend_from_slice(&content.hash.to_le_bytes());
    file.extend_from_slice(&content.id.0);
    file.extend_from_slice(&content.parent.0);
    file.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    content.tokens.iter().for_each(|token| file.extend_from_slice(&token.to_le_bytes()));
    file.extend_from_slice(bytes);
    let checksum = xxh3_64(&file);
    file.extend_from_slice(&checksum.to_le_bytes());
    file
}

/// The content of a file that is to hold `id`, and its block's bytes. The content has no place in host memory yet.
pub fn decode(format: &Format, id: &ContentId, file: &[u8]) -> Result<(CachedContent, Vec<u8>), FileFault> {
    let expected = format.file_bytes() as usize;
    if file.get(..8).is_none_or(|magic| magic != MAGIC) {
        return Err(if file.len() < 8 {
            FileFault::Truncated { found: file.len(), expected }
        } else {
            FileFault::NotABlock
        });
    }
    let mut rest = Reader(&file[8..]);
    let cut = FileFault::Truncated { found: file.len(), expected };
    let identity: [u8; 32] = rest.array().ok_or(cut)?;
    let block_size = u32::from_le_bytes(rest.array().ok_or(cut)?);
    if identity != format.identity || block_size != format.block_size {
        return Err(FileFault::Foreign);
    }
    if file.len() != expected {
        return Err(cut);
    }
    let (body, checksum) = file.split_at(file.len() - CHECKSUM_BYTES);
    if xxh3_64(body).to_le_bytes() != checksum {
        return Err(FileFault::Corrupt);
    }
    let _zero: [u8; 4] = rest.array().ok_or(cut)?;
    let salt = u64::from_le_bytes(rest.array().ok_or(cut)?);
    let adapter = u64::from_le_bytes(rest.array().ok_or(cut)?);
    let hash = u64::from_le_bytes(rest.array().ok_or(cut)?);
    let found = ContentId(rest.array().ok_or(cut)?);
    let parent = ContentId(rest.array().ok_or(cut)?);
    let num_bytes = u64::from_le_bytes(rest.array().ok_or(cut)?);
    let (tokens, bytes) = rest.0.split_at(4 * block_size as usize);
    let tokens: Vec<TokenId> = tokens.as_chunks::<4>().0.iter().map(|b| TokenId::from_le_bytes(*b)).collect();
    if found != *id || parent.child(&tokens) != found || num_bytes != format.bytes_per_block {
        return Err(FileFault::OtherContent);
    }
    let content =
        CachedContent { host: HostSlot(u32::MAX), id: found, parent, key: CacheKey { salt, adapter }, hash, tokens };
    Ok((content, bytes[..num_bytes as usize].to_vec()))
}

/// The identity that a file's content follows, from its header alone; `None` where that is no header.
pub fn parent_of(path: &std::path::Path) -> std::io::Result<Option<ContentId>> {
    let mut header = [0; HEADER_BYTES];
    std::io::Read::read_exact(&mut std::fs::File::open(path)?, &mut header)?;
    let parent = header[HEADER_BYTES - 8 - 32..].first_chunk::<32>().filter(|_| header.starts_with(&MAGIC));
    Ok(parent.map(|parent| ContentId(*parent)))
}

/// Takes arrays from the front of what is left.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: Format = Format { identity: [7; 32], block_size: 2, bytes_per_block: 12 };

    fn content() -> CachedContent {
        let key = CacheKey { salt: 3, adapter: 4 };
        let (parent, tokens) = (ContentId::root(key), vec![5, 6]);
        CachedContent { host: HostSlot(u32::MAX), id: parent.child(&tokens), parent, key, hash: 9, tokens }
    }

    #[test]
    fn a_file_comes_back_as_it_was_written() {
        let (content, bytes) = (content(), (0..12).collect::<Vec<u8>>());
        let file = encode(&FORMAT, &content, &bytes);
        assert_eq!(file.len() as u64, FORMAT.file_bytes());
        assert_eq!(decode(&FORMAT, &content.id, &file), Ok((content, bytes)));
    }

    #[test]
    fn what_is_damaged_or_foreign_is_refused_for_its_reason() {
        let content = content();
        let file = encode(&FORMAT, &content, &[1; 12]);
        let refused = |file: &[u8], format: &Format, id: &ContentId| decode(format, id, file).expect_err("refused");
        for len in 0..file.len() {
            let fault = refused(&file[..len], &FORMAT, &content.id);
            assert!(matches!(fault, FileFault::Truncated { .. }), "{len} bytes: {fault}");
        }
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            let fault = refused(&damaged, &FORMAT, &content.id);
            let expected = match at {
                0..8 => FileFault::NotABlock,
                8..44 => FileFault::Foreign,
                _ => FileFault::Corrupt,
            };
            assert_eq!(fault, expected, "byte {at}");
        }
        let other = Format { identity: [8; 32], ..FORMAT };
        assert_eq!(refused(&file, &other, &content.id), FileFault::Foreign);
        assert_eq!(refused(&file, &FORMAT, &content.parent), FileFault::OtherContent, "a file under another's name");
        // A file whose tokens were exchanged and whose checksum was made to fit.
        let forged = CachedContent { tokens: vec![5, 7], ..content.clone() };
        assert_eq!(refused(&encode(&FORMAT, &forged, &[1; 12]), &FORMAT, &content.id), FileFault::OtherContent);
        let longer = [file.as_slice(), &[0]].concat();
        assert!(matches!(refused(&longer, &FORMAT, &content.id), FileFault::Truncated { .. }));
    }
}
