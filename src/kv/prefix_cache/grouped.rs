//! Prefixes of models with several layer groups, or one that forgets.
//!
//! Guarantees: a hit names, for every group, all blocks that the token after it sees.

use super::{Name, PrefixCache, PrefixChain, Publication, ROOT, place};
use crate::ids::{BlockId, TokenId};
use crate::kv::lowest_seen;

impl PrefixCache {
    /// The longest hit that every group can serve.
    pub(super) fn lookup_groups(
        &self,
        chain: &PrefixChain,
        tokens: &[TokenId],
        max_blocks: usize,
        hit: &mut Vec<BlockId>,
    ) {
        let anchor = self.groups.anchor();
        let mut named: Vec<(Option<BlockId>, u64)> = Vec::new(); // the anchor's block and its number, by row
        let mut parent = ROOT;
        for (i, link) in chain.links.iter().enumerate().take(max_blocks) {
            let block = self.find(link.hash, parent, chain.key, self.part(tokens, i));
            let number = match block {
                Some(block) => Some(self.publications[block.idx()].number),
                None => self.names.find(link.hash, parent, chain.key, self.part(tokens, i)),
            };
            let Some(number) = number else { break };
            parent = number;
            named.push((block, number));
        }
        let find = |row: usize, group: u32| match group == anchor {
            true => named[row].0,
            false => self.find_beside(chain.links[row].hash, group, named[row].1),
        };
        // A missing row shortens the hit to before it: a shorter hit sees no less of what came before.
        let mut rows = named.len();
        let mut group = 0;
        while group < self.groups.num() {
            let missing = (self.first_row(rows, group)..rows).rev().find(|row| find(*row, group).is_none());
            (rows, group) = missing.map_or((rows, group + 1), |row| (row, 0));
        }
        for row in 0..rows {
            for group in 0..self.groups.num() {
                let is_seen = row >= self.first_row(rows, group);
                hit.push(if is_seen { find(row, group).unwrap_or(BlockId::NULL) } else { BlockId::NULL });
            }
        }
    }

    /// The first row that the token after a hit of `rows` sees.
    fn first_row(&self, rows: usize, group: u32) -> usize {
        let position = (rows * self.block_size) as u32;
        (lowest_seen(self.groups.window(group), position) as usize / self.block_size).min(rows)
    }

    /// Forgets a block that the open step takes. When the step commits its name is kept, where names are needed.
    pub fn evict(&mut self, block: BlockId) {
        self.forget(block);
        let publication = self.publications[block.idx()];
        let anchor = self.groups.anchor();
        if publication.group == anchor && self.groups.window(anchor).is_some() {
            self.names.pending.push((block, publication.number));
        }
    }

    /// The open step is over: what it evicted is gone for good.
    pub fn commit(&mut self) {
        for (block, number) in std::mem::take(&mut self.names.pending) {
            let publication = self.publications[block.idx()];
            if publication.number == number {
                let Publication { hash, parent_number, key, .. } = publication;
                let tokens = self.tokens_of(block).into();
                self.names.insert(hash, Name { number, parent_number, key, tokens });
            }
        }
    }

    /// The open step never was.
    pub fn undo(&mut self) {
        self.names.pending.clear();
        self.log.undo();
    }

    /// The block of another group than the anchor that holds the tokens of the anchor's publication `named`.
    pub(super) fn find_beside(&self, hash: u64, group: u32, named: u64) -> Option<BlockId> {
        let block = *self.block_of_hash.get(&place(hash, group))?;
        let publication = &self.publications[block.idx()];
        (publication.group == group && publication.parent_number == named).then_some(block)
    }
}
