//! Places for the content of blocks in host memory: who holds which, and which can be found again by content.
//!
//! Guarantees: a place is free, being written by the step in flight, held by one preempted request, or cached under the
//! identity of its content; nothing is findable before the step that wrote it has committed; a place that the open step
//! reads is not given away in it; content that preempted requests rely on is not dropped while places last. Every change
//! inside a step is journalled, so undoing restores the pool exactly.
//! It does not hold bytes: the executor does.

use super::prefix_cache::{CacheKey, ContentId};
use crate::ids::{BlockId, HostSlot, RequestId, TokenId};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;

/// One block's content on its way between the pool and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostTransfer {
    pub block: BlockId,
    pub host: HostSlot,
}

/// What a place is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostState {
    #[default]
    Free,
    /// The step in flight copies content into it, which is held by a request or else cached.
    Writing(Option<RequestId>),
    /// Holds a block of this preempted request.
    Held(RequestId),
    /// Can be found by content.
    Cached,
}

/// What names the content of a cached place, besides its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ContentKey {
    pub id: ContentId,
    pub parent: ContentId,
    pub key: CacheKey,
    pub hash: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slot {
    pub state: HostState,
    pub key: ContentKey,
    /// Order of use.
    stamp: u64,
    /// Read from disk and not yet found by a request.
    from_disk: bool,
}

#[derive(Debug)]
enum HostUndo {
    Slot(HostSlot, Slot),
    Want(ContentId, u32),
}

/// Counts over the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCounts {
    pub total: u32,
    pub free: u32,
    /// Held by preempted requests.
    pub swapped: u32,
    pub cached: u32,
}

/// What a preempted request left to come back to: its first blocks are found by content, the others are held.
#[derive(Clone, Debug)]
pub struct SwappedTable {
    pub(super) owner: RequestId,
    pub(super) num_computed: u32,
    /// Contents that are kept for it, first block first.
    pub(super) kept: Vec<ContentId>,
    /// Places of the blocks after those.
    pub(super) slots: Vec<HostSlot>,
}

impl SwappedTable {
    /// Positions that had their K and V.
    pub fn num_computed(&self) -> u32 {
        self.num_computed
    }

    /// Blocks that are found by content.
    pub fn num_kept(&self) -> u32 {
        self.kept.len() as u32
    }

    /// Blocks that are held.
    pub fn num_held(&self) -> u32 {
        self.slots.len() as u32
    }
}

#[derive(Debug, Default)]
pub(super) struct HostPool {
    slots: Vec<Slot>,
    tokens: Vec<TokenId>, // [slots, block_size], of cached places
    free: BTreeSet<HostSlot>,
    /// Cached places that nobody relies on, by order of use.
    lru: BTreeSet<(u64, HostSlot)>,
    by_id: FxHashMap<ContentId, HostSlot>,
    /// How many preempted requests rely on a content, wherever it is.
    wanted: FxHashMap<ContentId, u32>,
    /// Wanted contents that have a place.
    num_wanted_here: u32,
    num_cached: u32,
    num_held: u32,
    last_stamp: u64,
    /// `Some` while a step is open: `last_stamp` before it.
    open: Option<u64>,
    journal: Vec<HostUndo>,
    /// Places that become free when the open step is over.
    leaving: Vec<HostSlot>,
}

impl HostPool {
    pub fn new(num_slots: u32, block_size: u32) -> Self {
        HostPool {
            slots: vec![Slot::default(); num_slots as usize],
            tokens: vec![0; num_slots as usize * block_size as usize],
            free: (0..num_slots).map(HostSlot).collect(),
            ..HostPool::default()
        }
    }

    pub fn is_on(&self) -> bool {
        !self.slots.is_empty()
    }

    pub fn counts(&self) -> HostCounts {
        HostCounts {
            total: self.slots.len() as u32,
            free: self.free.len() as u32,
            swapped: self.num_held,
            cached: self.num_cached,
        }
    }

    pub fn slot(&self, slot: HostSlot) -> &Slot {
        &self.slots[slot.idx()]
    }

    pub fn slots(&self) -> impl Iterator<Item = (HostSlot, &Slot)> {
        self.slots.iter().enumerate().map(|(i, slot)| (HostSlot(i as u32), slot))
    }

    pub fn tokens_of(&self, slot: HostSlot) -> &[TokenId] {
        let size = self.tokens.len() / self.slots.len();
        &self.tokens[slot.idx() * size..(slot.idx() + 1) * size]
    }

    pub fn begin(&mut self) {
        self.open = Some(self.last_stamp);
    }

    /// The step ran: what it wrote is there. `tokens_of` gives what the transfers of cached content hold.
    pub fn commit<'t>(&mut self, cached: impl Iterator<Item = (HostSlot, &'t [TokenId])>) {
        self.close();
        for (slot, tokens) in cached {
            let at = slot.idx() * tokens.len();
            self.tokens[at..at + tokens.len()].copy_from_slice(tokens);
        }
        self.settle(|slot| match slot.state {
            HostState::Writing(Some(owner)) => HostState::Held(owner),
            HostState::Writing(None) => HostState::Cached,
            state => state,
        });
    }

    /// The step failed on its way: what it was writing is worth nothing, what it was reading is as it was. `freed` hears
    /// of the places that were to be cached.
    pub fn abandon(&mut self, mut freed: impl FnMut(HostSlot)) {
        self.close();
        self.slots().filter(|(_, slot)| slot.state == HostState::Writing(None)).for_each(|(host, _)| freed(host));
        self.settle(|slot| match slot.state {
            // Its owner lets go of it next.
            HostState::Writing(Some(owner)) => HostState::Held(owner),
            HostState::Writing(None) => HostState::Free,
            state => state,
        });
    }

    fn close(&mut self) {
        assert!(self.open.take().is_some(), "no step is open");
    }

    fn settle(&mut self, becomes: impl Fn(&Slot) -> HostState) {
        let touched: Vec<HostSlot> = self
            .journal
            .drain(..)
            .filter_map(|undo| match undo {
                HostUndo::Slot(slot, _) => Some(slot),
                HostUndo::Want(..) => None,
            })
            .collect();
        for slot in touched {
            let state = becomes(&self.slots[slot.idx()]);
            self.set(slot, Slot { state, ..self.slots[slot.idx()] });
        }
        for slot in std::mem::take(&mut self.leaving) {
            self.set(slot, Slot::default());
        }
    }

    /// The step never ran.
    pub fn undo(&mut self) {
        let stamp = self.open.take().expect("no step is open");
        while let Some(undo) = self.journal.pop() {
            match undo {
                HostUndo::Slot(slot, old) => self.set(slot, old),
                HostUndo::Want(id, old) => self.set_want(id, old),
            }
        }
        self.leaving.clear();
        self.last_stamp = stamp;
    }

    /// Where this content is, compared token by token.
    pub fn find(&self, id: &ContentId, key: CacheKey, tokens: &[TokenId]) -> Option<HostSlot> {
        let slot = *self.by_id.get(id)?;
        let found = self.slot(slot);
        let is_equal = found.state == HostState::Cached && found.key.key == key && self.tokens_of(slot) == tokens;
        is_equal.then_some(slot)
    }

    /// True when this content has a place, or gets one in the open step.
    pub fn holds(&self, id: &ContentId) -> bool {
        self.by_id.contains_key(id)
    }

    /// Where this content is, or will be once the open step has run.
    pub fn place_of(&self, id: &ContentId) -> Option<HostSlot> {
        self.by_id.get(id).copied()
    }

    /// Places that can be taken without dropping what somebody relies on, or was promised.
    pub fn room(&self) -> u32 {
        let promised = self.wanted.len() - self.num_wanted_here as usize;
        // What the open step writes or reads is not given away in it.
        let fresh = self.open.map_or(0, |before| self.lru.range((before + 1, HostSlot(0))..).count());
        (self.free.len() + self.lru.len()).saturating_sub(promised + fresh) as u32
    }

    pub fn is_wanted(&self, id: &ContentId) -> bool {
        self.wanted.contains_key(id)
    }

    /// The open step reads this place, or finds that what it was to write is there: it is the last to be dropped. True
    /// when it had come from disk and is found for the first time.
    pub fn touch(&mut self, slot: HostSlot) -> bool {
        let old = self.slots[slot.idx()];
        self.last_stamp += 1;
        self.change(slot, Slot { stamp: self.last_stamp, from_disk: false, ..old });
        old.from_disk
    }

    /// A place to write cached content to in the open step; `None` when there is no room. `dropped` hears of the cached
    /// content that goes, and of its tokens.
    pub fn take_cached(
        &mut self,
        key: ContentKey,
        dropped: &mut impl FnMut(HostSlot, &Slot, &[TokenId]),
    ) -> Option<HostSlot> {
        if self.room() == 0 && !self.is_wanted(&key.id) {
            return None;
        }
        let slot = self.take(dropped)?;
        self.last_stamp += 1;
        let state = HostState::Writing(None);
        self.change(slot, Slot { state, key, stamp: self.last_stamp, from_disk: false });
        Some(slot)
    }

    /// A place to write a preempted request's block to in the open step.
    pub fn take_held(
        &mut self,
        owner: RequestId,
        dropped: &mut impl FnMut(HostSlot, &Slot, &[TokenId]),
    ) -> Option<HostSlot> {
        if self.room() == 0 {
            return None;
        }
        let slot = self.take(dropped)?;
        self.change(slot, Slot { state: HostState::Writing(Some(owner)), ..Slot::default() });
        Some(slot)
    }

    /// Puts content that came from disk into a place, between steps.
    pub fn adopt(
        &mut self,
        key: ContentKey,
        tokens: &[TokenId],
        dropped: &mut impl FnMut(HostSlot, &Slot, &[TokenId]),
    ) -> Option<HostSlot> {
        assert!(self.open.is_none(), "content is adopted between steps");
        if self.holds(&key.id) || self.room() == 0 {
            return None;
        }
        let slot = self.take(dropped)?;
        self.last_stamp += 1;
        self.tokens[slot.idx() * tokens.len()..(slot.idx() + 1) * tokens.len()].copy_from_slice(tokens);
        self.set(slot, Slot { state: HostState::Cached, key, stamp: self.last_stamp, from_disk: true });
        Some(slot)
    }

    /// A free place, or the one whose content was used longest ago.
    fn take(&mut self, dropped: &mut impl FnMut(HostSlot, &Slot, &[TokenId])) -> Option<HostSlot> {
        if let Some(&slot) = self.free.first() {
            return Some(slot);
        }
        let &(stamp, slot) = self.lru.first()?;
        if self.open.is_some_and(|before| stamp > before) {
            return None;
        }
        dropped(slot, &self.slots[slot.idx()], self.tokens_of(slot));
        self.change(slot, Slot::default());
        Some(slot)
    }

    /// A held place is free: at once, or when the open step is over, since that may read it.
    pub fn leave(&mut self, slot: HostSlot) {
        if self.open.is_some() {
            self.leaving.push(slot);
        } else {
            self.set(slot, Slot::default());
        }
    }

    /// Suspect content is dropped.
    pub fn forget(&mut self, id: &ContentId) -> Option<HostSlot> {
        assert!(self.open.is_none(), "content is dropped between steps");
        let slot = *self.by_id.get(id)?;
        self.set(slot, Slot::default());
        Some(slot)
    }

    /// Drops these contents and those that follow them, between steps; gives their places and hashes.
    pub fn drop_cached(&mut self, mut doomed: FxHashSet<ContentId>) -> Vec<(HostSlot, u64)> {
        assert!(self.open.is_none(), "content is dropped between steps");
        let cached: Vec<(HostSlot, ContentKey)> =
            self.by_id.values().map(|&slot| (slot, self.slots[slot.idx()].key)).collect();
        let mut num_doomed = 0;
        while num_doomed < doomed.len() {
            num_doomed = doomed.len();
            doomed.extend(
                cached
                    .iter()
                    .filter(|(_, key)| doomed.contains(&key.parent))
                    .map(|(_, key)| key.id)
                    .collect::<Vec<_>>(),
            );
        }
        let is_doomed = |(_, key): &&(HostSlot, ContentKey)| doomed.contains(&key.id);
        let mut dropped: Vec<(HostSlot, u64)> =
            cached.iter().filter(is_doomed).map(|(slot, key)| (*slot, key.hash)).collect();
        dropped.sort_unstable();
        dropped.iter().for_each(|(slot, _)| self.set(*slot, Slot::default()));
        dropped
    }

    /// True when another content than `child` follows this one here.
    pub fn has_other_child(&self, id: &ContentId, child: &ContentId) -> bool {
        self.by_id.values().map(|slot| &self.slots[slot.idx()].key).any(|key| key.parent == *id && key.id != *child)
    }

    /// A preempted request relies on this content, or no longer does.
    pub fn want(&mut self, id: ContentId, more: bool) {
        let old = self.wanted.get(&id).copied().unwrap_or(0);
        if self.open.is_some() {
            self.journal.push(HostUndo::Want(id, old));
        }
        self.set_want(id, if more { old + 1 } else { old - 1 });
    }

    fn set_want(&mut self, id: ContentId, count: u32) {
        let slot = self.by_id.get(&id).copied();
        if let Some(slot) = slot {
            self.unlist(slot);
        }
        match count {
            0 => drop(self.wanted.remove(&id)),
            count => drop(self.wanted.insert(id, count)),
        }
        if let Some(slot) = slot {
            self.list(slot);
        }
    }

    fn change(&mut self, slot: HostSlot, new: Slot) {
        if self.open.is_some() {
            self.journal.push(HostUndo::Slot(slot, self.slots[slot.idx()]));
        }
        self.set(slot, new);
    }

    fn set(&mut self, slot: HostSlot, new: Slot) {
        self.unlist(slot);
        self.slots[slot.idx()] = new;
        self.list(slot);
    }

    /// Takes a place out of every index; they follow from its state alone.
    fn unlist(&mut self, slot: HostSlot) {
        let Slot { state, key, stamp, .. } = self.slots[slot.idx()];
        match state {
            HostState::Free => drop(self.free.remove(&slot)),
            HostState::Writing(Some(_)) | HostState::Held(_) => self.num_held -= 1,
            HostState::Writing(None) | HostState::Cached => {
                self.by_id.remove(&key.id);
                self.num_cached -= 1;
                if self.wanted.contains_key(&key.id) {
                    self.num_wanted_here -= 1;
                } else {
                    self.lru.remove(&(stamp, slot));
                }
            }
        }
    }

    fn list(&mut self, slot: HostSlot) {
        let Slot { state, key, stamp, .. } = self.slots[slot.idx()];
        match state {
            HostState::Free => drop(self.free.insert(slot)),
            HostState::Writing(Some(_)) | HostState::Held(_) => self.num_held += 1,
            HostState::Writing(None) | HostState::Cached => {
                self.by_id.insert(key.id, slot);
                self.num_cached += 1;
                if self.wanted.contains_key(&key.id) {
                    self.num_wanted_here += 1;
                } else {
                    self.lru.insert((stamp, slot));
                }
            }
        }
    }

    /// Every place is in the index of its state, and `swapped` tables hold the held ones, each once.
    pub fn check<'a>(&self, swapped: impl Iterator<Item = &'a SwappedTable>) -> Result<(), String> {
        let mut holders = vec![None; self.slots.len()];
        let mut wanted: FxHashMap<ContentId, u32> = FxHashMap::default();
        for table in swapped {
            for slot in &table.slots {
                if holders[slot.idx()].replace(table.owner).is_some() {
                    return Err(format!("host slot {slot} is held by request {} and another", table.owner));
                }
            }
            table.kept.iter().for_each(|id| *wanted.entry(*id).or_default() += 1);
        }
        if wanted != self.wanted {
            return Err("the contents that preempted requests rely on are counted wrongly".into());
        }
        let (mut cached, mut held) = (0, 0);
        for (slot, found) in self.slots() {
            let is_held = matches!(found.state, HostState::Held(_) | HostState::Writing(Some(_)));
            let is_cached = matches!(found.state, HostState::Cached | HostState::Writing(None));
            (cached, held) = (cached + u32::from(is_cached), held + u32::from(is_held));
            let owner = match found.state {
                HostState::Held(owner) | HostState::Writing(Some(owner)) => Some(owner),
                _ => None,
            };
            // What leaves at the end of the step has no holder any more.
            if owner != holders[slot.idx()] && !self.leaving.contains(&slot) {
                return Err(format!("host slot {slot} is {:?}, held by {:?}", found.state, holders[slot.idx()]));
            }
            if matches!(found.state, HostState::Writing(_)) && self.open.is_none() {
                return Err(format!("host slot {slot} is being written, but no step is in flight"));
            }
            if is_cached && self.by_id.get(&found.key.id) != Some(&slot) {
                return Err(format!("host slot {slot} is not found by its content"));
            }
            let in_lru = is_cached && !self.wanted.contains_key(&found.key.id);
            if in_lru != self.lru.contains(&(found.stamp, slot))
                || self.free.contains(&slot) != (found.state == HostState::Free)
            {
                return Err(format!("host slot {slot} is {:?}, but listed otherwise", found.state));
            }
        }
        let listed = self.free.len() + self.by_id.len() + held as usize;
        if (cached, held) != (self.num_cached, self.num_held) || listed != self.slots.len() {
            return Err(format!("{listed} host slots are listed of {}: {:?}", self.slots.len(), self.counts()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> ContentKey {
        ContentKey { id: ContentId([n; 32]), ..ContentKey::default() }
    }

    /// Writes contents into the pool, each of the tokens `[n, n]`.
    fn cache(pool: &mut HostPool, contents: &[u8]) -> Vec<u8> {
        let mut gone = Vec::new();
        pool.begin();
        let mut written = Vec::new();
        for &n in contents {
            let slot = pool.take_cached(key(n), &mut |_, old, _| gone.push(old.key.id.0[0]));
            written.extend(slot.map(|slot| (slot, [TokenId::from(n); 2])));
        }
        pool.commit(written.iter().map(|(slot, tokens)| (*slot, &tokens[..])));
        let wishes = pool.wanted.iter().flat_map(|(id, times)| vec![*id; *times as usize]).collect();
        let table = SwappedTable { owner: RequestId(1), num_computed: 0, kept: wishes, slots: Vec::new() };
        pool.check([&table].into_iter()).expect("consistent");
        gone
    }

    fn find(pool: &HostPool, n: u8) -> bool {
        pool.find(&key(n).id, CacheKey::default(), &[TokenId::from(n); 2]).is_some()
    }

    #[test]
    fn content_that_makes_room_for_what_comes_from_disk_is_told_with_its_own_tokens() {
        let mut pool = HostPool::new(1, 2);
        cache(&mut pool, &[1]);
        let mut told = None;
        let mut note = |_, old: &Slot, tokens: &[TokenId]| told = Some((old.key.id, tokens.to_vec()));
        pool.adopt(key(2), &[2, 2], &mut note).expect("a place");
        assert_eq!(told, Some((key(1).id, vec![1, 1])));
        assert!(find(&pool, 2) && !find(&pool, 1));
    }

    #[test]
    fn the_content_used_longest_ago_makes_room() {
        let mut pool = HostPool::new(2, 2);
        assert_eq!(cache(&mut pool, &[1, 2]), Vec::<u8>::new());
        pool.begin();
        pool.touch(HostSlot(0));
        pool.commit([].into_iter());
        assert_eq!(cache(&mut pool, &[3]), [2]);
        assert!(find(&pool, 1) && find(&pool, 3) && !find(&pool, 2));
        assert_eq!(pool.find(&key(1).id, CacheKey { salt: 9, adapter: 0 }, &[1, 1]), None, "another salt");
        assert_eq!(pool.find(&key(1).id, CacheKey::default(), &[1, 2]), None, "other tokens");
    }

    #[test]
    fn what_a_step_wrote_or_read_is_not_given_away_in_it() {
        let mut pool = HostPool::new(2, 2);
        assert_eq!(
            cache(&mut pool, &[1, 2, 3]),
            Vec::<u8>::new(),
            "the third finds no place that the step does not write"
        );
        pool.begin();
        pool.touch(HostSlot(0));
        pool.touch(HostSlot(1));
        assert_eq!(pool.take_cached(key(4), &mut |_, _, _| {}), None);
        assert_eq!(pool.take_held(RequestId(1), &mut |_, _, _| {}), None);
        pool.commit([].into_iter());
    }

    #[test]
    fn content_that_somebody_relies_on_stays_and_has_a_place_to_come_to() {
        let mut pool = HostPool::new(2, 2);
        cache(&mut pool, &[1]);
        pool.want(key(1).id, true);
        pool.want(key(2).id, true);
        assert_eq!(pool.room(), 0, "one place is relied on, one is promised");
        assert_eq!(cache(&mut pool, &[3]), Vec::<u8>::new());
        assert!(!find(&pool, 3));
        cache(&mut pool, &[2]);
        assert!(find(&pool, 1) && find(&pool, 2));
        pool.want(key(1).id, false);
        assert_eq!(cache(&mut pool, &[3]), [1]);
    }

    #[test]
    fn undo_restores_places_wishes_and_order() {
        let mut pool = HostPool::new(3, 2);
        cache(&mut pool, &[1, 2, 3]);
        let before = format!("{:?}", (&pool.slots, &pool.free, &pool.lru, &pool.wanted, pool.last_stamp));
        pool.begin();
        pool.want(key(2).id, true);
        pool.touch(HostSlot(0));
        pool.take_cached(key(4), &mut |_, _, _| {}).expect("a place");
        pool.undo();
        let after = format!("{:?}", (&pool.slots, &pool.free, &pool.lru, &pool.wanted, pool.last_stamp));
        assert_eq!(before, after);
        assert!(find(&pool, 1) && find(&pool, 2) && find(&pool, 3));
    }

    #[test]
    fn an_abandoned_step_leaves_nothing_to_be_found() {
        let mut pool = HostPool::new(2, 2);
        cache(&mut pool, &[1]);
        pool.begin();
        pool.take_cached(key(2), &mut |_, _, _| {}).expect("a place");
        pool.abandon(|host| assert_eq!(host, HostSlot(1)));
        assert!(find(&pool, 1) && !find(&pool, 2));
        assert_eq!(pool.counts().free, 1);
    }
}
