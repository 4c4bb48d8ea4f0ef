//! Which tokens of a step have a LoRA adapter, as the kernels read it: runs of tokens with the same one, cut into tiles.
//!
//! Guarantees: each token with an adapter is in exactly one tile; tokens without one are in none and cost nothing. The
//! cut changes no bit: a token's sums do not depend on who shares its tile.

use super::step_meta::{header, section};
use crate::batch::StepBatch;

/// Most tokens of a tile.
pub const TILE_TOKENS: u32 = 4;
/// Words of a tile in the metadata.
pub const TILE_WORDS: usize = 4;

/// Where an adapter lies, and what of it there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub slot: u32,
    pub rank: u32,
    /// A bit for each projection that it changes: Q, K, V, O, gate, up, down.
    pub parts: u32,
}

/// Tokens in a row that have the same adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub first: u32,
    pub count: u32,
    pub place: Place,
}

/// What a step's dispatches depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoraShape {
    pub num_tiles: u32,
    /// Tokens of a tile that the kernels are compiled for: 1, or [`TILE_TOKENS`].
    pub columns: u32,
    /// The projections that some adapter of the step changes.
    pub parts: u32,
}

/// A step's adapters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoraWork {
    pub tiles: Vec<Tile>,
    /// Of each token; empty when no row of the step has an adapter.
    parts_of_token: Vec<u32>,
}

impl LoraWork {
    /// Finds the tiles of a batch in place of what was there. `place` says where an adapter lies; the error is the first
    /// that lies nowhere.
    pub fn plan(&mut self, batch: &StepBatch, place: impl Fn(u64) -> Option<Place>) -> Result<(), u64> {
        self.tiles.clear();
        self.parts_of_token.clear();
        if batch.adapter_of_row.iter().all(|&id| id == 0) {
            return Ok(());
        }
        for (token, &row) in batch.row_of_token.iter().enumerate() {
            let id = batch.adapter(row as usize);
            if id == 0 {
                self.parts_of_token.push(0);
                continue;
            }
            let place = place(id).ok_or(id)?;
            self.parts_of_token.push(place.parts);
            let token = token as u32;
            match self.tiles.last_mut() {
                Some(tile) if tile.place == place && tile.first + tile.count == token && tile.count < TILE_TOKENS => {
                    tile.count += 1;
                }
                _ => self.tiles.push(Tile { first: token, count: 1, place }),
            }
        }
        Ok(())
    }

    pub fn shape(&self) -> LoraShape {
        let is_wide = self.tiles.iter().any(|tile| tile.count > 1);
        LoraShape {
            num_tiles: self.tiles.len() as u32,
            columns: if is_wide { TILE_TOKENS } else { 1 },
            parts: self.tiles.iter().fold(0, |parts, tile| parts | tile.place.parts),
        }
    }

    /// Words that [`LoraWork::append`] adds.
    pub fn num_words(&self) -> usize {
        self.tiles.len() * TILE_WORDS + self.parts_of_token.len()
    }

    /// The most words for so many tokens.
    pub fn max_words(num_tokens: u64) -> u64 {
        num_tokens * (TILE_WORDS as u64 + 1)
    }

    /// Adds its sections to a step's metadata.
    pub fn append(&self, words: &mut Vec<u32>) {
        words[header::NUM_LORA_TILES] = self.tiles.len() as u32;
        let tile = |t: &Tile| [t.first, t.count, t.place.slot, t.place.rank | t.place.parts << 16];
        section(words, header::LORA_TILES, self.tiles.iter().flat_map(tile));
        section(words, header::LORA_PARTS, self.parts_of_token.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_runs_of_tokens_with_the_same_adapter() {
        let batch = StepBatch {
            row_of_token: vec![0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5],
            adapter_of_row: vec![7, 0, 9, 9, 7],
            ..StepBatch::default()
        };
        let place = |id| (id == 7 || id == 9).then_some(Place { slot: id as u32, rank: 8, parts: 3 });
        let mut work = LoraWork::default();
        assert_eq!(work.plan(&batch, place), Ok(()));
        let runs: Vec<_> = work.tiles.iter().map(|t| (t.first, t.count, t.place.slot)).collect();
        assert_eq!(runs, [(0, 2, 7), (3, 4, 9), (7, 2, 9), (9, 1, 7)]);
        assert_eq!(work.parts_of_token, [3, 3, 0, 3, 3, 3, 3, 3, 3, 3, 0]);
        assert_eq!(work.shape(), LoraShape { num_tiles: 4, columns: TILE_TOKENS, parts: 3 });
        assert!(work.num_words() as u64 <= LoraWork::max_words(11));
        assert_eq!(work.plan(&batch, |_| None), Err(7));
        assert_eq!(work.plan(&StepBatch { adapter_of_row: vec![], ..batch }, place), Ok(()));
        assert_eq!((work.shape().num_tiles, work.num_words()), (0, 0));
    }
}
