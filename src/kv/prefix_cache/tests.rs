//! The prefix cache by itself.

use super::*;

fn cache(hash_mask: u64) -> PrefixCache {
    cache_of_size(2, hash_mask)
}

fn cache_of_size(block_size: u32, hash_mask: u64) -> PrefixCache {
    let groups = KvGroups::ONE;
    PrefixCache::new(KvConfig { num_blocks: 10, block_size, groups, enable_prefix_cache: true }, hash_mask)
}

/// Publishes `tokens` in blocks of 2 from block `first` on.
fn publish(cache: &mut PrefixCache, salt: u64, tokens: &[TokenId], first: u32) -> PrefixChain {
    let mut chain = PrefixChain::new(CacheKey { salt, adapter: 0 }, 2, cache.hash_mask);
    chain.extend(tokens);
    for i in 0..chain.len() {
        cache.publish(&mut chain, tokens, (i, 0), BlockId(first + i as u32), |_| false);
    }
    chain
}

fn lookup(cache: &PrefixCache, salt: u64, tokens: &[TokenId]) -> Vec<u32> {
    let mut chain = PrefixChain::new(CacheKey { salt, adapter: 0 }, 2, cache.hash_mask);
    chain.extend(tokens);
    let mut hit = Vec::new();
    let in_part = cache.lookup(&chain, tokens, &mut hit);
    hit.truncate(hit.len() - usize::from(in_part > 0));
    hit.iter().map(|b| b.0).collect()
}

/// The block found in part and how much of it, in a cache with blocks of 4.
fn lookup_in_part(cache: &PrefixCache, salt: u64, tokens: &[TokenId]) -> Option<(u32, u32)> {
    let mut chain = PrefixChain::new(CacheKey { salt, adapter: 0 }, 4, cache.hash_mask);
    chain.extend(tokens);
    let mut hit = Vec::new();
    let len = cache.lookup(&chain, tokens, &mut hit);
    (len > 0).then(|| (hit[hit.len() - 1].0, len))
}

#[test]
fn identities_depend_on_salt_and_on_every_token_before() {
    let ids = |salt, tokens: &[TokenId]| {
        let key = CacheKey { salt, ..CacheKey::default() };
        let mut chain = PrefixChain::new(key, 2, 0).with_ids();
        chain.extend(tokens);
        chain.ids.expect("kept")
    };
    let all = [ids(0, &[1, 2, 3, 4]), ids(1, &[1, 2, 3, 4]), ids(0, &[1, 9, 3, 4])];
    let mut names: Vec<ContentId> = all.concat();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 6);
    assert_eq!(ids(0, &[1, 2, 3, 4, 5])[..2], all[0][..]);
}

#[test]
fn the_longest_common_run_of_full_blocks_is_found() {
    let mut cache = cache(u64::MAX);
    publish(&mut cache, 0, &[1, 2, 3, 4, 5, 6, 7], 1);
    assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 5, 6, 7]), [1, 2, 3]);
    assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 9, 6]), [1, 2]);
    assert_eq!(lookup(&cache, 0, &[3, 4]), [] as [u32; 0], "the same tokens at another place are another prefix");
    assert_eq!(lookup(&cache, 1, &[1, 2, 3, 4]), [] as [u32; 0], "another salt is another cache");
}

#[test]
fn colliding_hashes_are_told_apart_by_tokens_and_parents() {
    // Mask 0: every block has the same hash.
    let mut cache = cache(0);
    publish(&mut cache, 0, &[1, 2], 1);
    assert_eq!(lookup(&cache, 0, &[1, 2]), [1]);
    assert_eq!(lookup(&cache, 0, &[3, 4]), [] as [u32; 0], "other tokens");
    assert_eq!(lookup(&cache, 5, &[1, 2]), [] as [u32; 0], "other salt");
    publish(&mut cache, 0, &[7, 8, 1, 2], 2);
    assert_eq!(lookup(&cache, 0, &[1, 2]), [] as [u32; 0], "the same tokens below another parent");
}

#[test]
fn the_block_that_goes_on_alike_for_longest_is_found_in_part() {
    // Mask 0: hashes tell nothing, and each publication takes the place of the one before.
    for mask in [u64::MAX, 0] {
        let mut cache = cache_of_size(4, mask);
        let mut chain = PrefixChain::new(CacheKey::default(), 4, mask);
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
        chain.extend(&tokens);
        cache.publish(&mut chain, &tokens, (0, 0), BlockId(1), |_| false);
        assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 9]), Some((1, 2)));
        assert_eq!(lookup_in_part(&cache, 7, &[1, 2, 9]), None, "another salt");
        assert_eq!(lookup_in_part(&cache, 0, &[2, 3]), None);
        cache.publish(&mut chain, &tokens, (1, 0), BlockId(2), |_| false);
        let after_1 = if mask == 0 { None } else { Some((2, 3)) };
        assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 3, 4, 5, 6, 7, 9, 9]), after_1);
        assert_eq!(lookup_in_part(&cache, 0, &[5, 6, 7]), None, "the same tokens at another place");
    }
}

#[test]
fn a_tail_is_found_with_its_tokens_and_nothing_beyond_them() {
    let mut cache = cache_of_size(4, u64::MAX);
    let mut chain = PrefixChain::new(CacheKey::default(), 4, u64::MAX);
    let tokens = [1, 2, 3, 4, 5, 6, 7];
    chain.extend(&tokens);
    cache.publish(&mut chain, &tokens, (0, 0), BlockId(1), |_| false);
    assert!(matches!(
        cache.publish_tail(&chain, &tokens, BlockId(2), |_| false),
        Published::Now { replaced: None, .. }
    ));
    assert_eq!(cache.publish_tail(&chain, &tokens[..6], BlockId(3), |_| false), Published::Duplicate);
    assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9]), Some((2, 3)));
    assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 3, 4, 5, 6]), Some((2, 2)));
    assert_eq!((cache.check(BlockId(1)), cache.check(BlockId(2))), (Ok(()), Ok(())));
    cache.forget(BlockId(2));
    assert_eq!(lookup_in_part(&cache, 0, &tokens), None);
    cache.restore(BlockId(2));
    assert_eq!(lookup_in_part(&cache, 0, &tokens), Some((2, 3)));
}

#[test]
fn a_forgotten_parent_makes_its_children_unfindable_until_published_again() {
    let mut cache = cache(u64::MAX);
    publish(&mut cache, 0, &[1, 2, 3, 4], 1);
    cache.forget(BlockId(1));
    assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4]), [] as [u32; 0]);
    publish(&mut cache, 0, &[1, 2, 3, 4], 5);
    assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4]), [5, 6]);
}

/// Publishes rows of 2 tokens in every group, row i in blocks `first + i * num_groups..`.
fn publish_groups(cache: &mut PrefixCache, tokens: &[TokenId], first: u32) -> PrefixChain {
    let mut chain = PrefixChain::new(CacheKey::default(), 2, cache.hash_mask);
    chain.extend(tokens);
    let groups = cache.groups.num();
    for row in 0..chain.len() {
        for group in 0..groups {
            let block = BlockId(first + row as u32 * groups + group);
            cache.publish(&mut chain, tokens, (row, group), block, |_| false);
        }
    }
    chain
}

fn cache_of(windows: &[Option<u32>], hash_mask: u64) -> PrefixCache {
    let groups = KvGroups::new(windows);
    PrefixCache::new(KvConfig { num_blocks: 20, block_size: 2, groups, enable_prefix_cache: true }, hash_mask)
}

#[test]
fn a_windowed_group_needs_the_blocks_that_the_next_token_sees() {
    for mask in [u64::MAX, 0] {
        let mut cache = cache_of(&[None, Some(3)], mask);
        if mask == 0 {
            // All hashes collide: only the last row can be found, so there is but one.
            publish_groups(&mut cache, &[1, 2], 1);
            assert_eq!(lookup(&cache, 0, &[1, 2]), [1, 2]);
            assert_eq!(lookup(&cache, 0, &[3, 2]), [] as [u32; 0]);
            continue;
        }
        publish_groups(&mut cache, &[1, 2, 3, 4, 5, 6], 1);
        // Position 6 sees 4 to 6, position 4 sees 2 to 4.
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 5, 6]), [1, 0, 3, 0, 5, 6]);
        cache.forget(BlockId(2));
        cache.forget(BlockId(6));
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 5, 6]), [1, 0, 3, 4], "the longest that both groups can serve");
        cache.forget(BlockId(4));
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 5, 6]), [] as [u32; 0]);
        publish_groups(&mut cache, &[1, 2, 3, 4], 11);
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 5, 6]), [1, 0, 3, 14], "equals of what is there are not published");
    }
}

#[test]
fn where_all_layers_have_windows_names_outlive_blocks() {
    let mut cache = cache_of(&[Some(2)], u64::MAX);
    let tokens = [1, 2, 3, 4, 5, 6];
    publish_groups(&mut cache, &tokens, 1);
    assert_eq!(lookup(&cache, 0, &tokens), [0, 0, 3]);
    cache.evict(BlockId(1));
    cache.undo();
    cache.restore(BlockId(1));
    assert!(cache.names.of_hash.is_empty(), "the step never was");
    cache.evict(BlockId(1));
    cache.commit();
    assert_eq!(lookup(&cache, 0, &tokens), [0, 0, 3], "its first block is gone, its name is known");
    assert_eq!(lookup(&cache, 0, &[9, 2, 3, 4, 5, 6]), [] as [u32; 0], "the tokens of what is gone still count");
    cache.names.limit = 1;
    cache.evict(BlockId(2));
    cache.commit();
    assert_eq!(lookup(&cache, 0, &tokens), [] as [u32; 0], "the oldest name was given up");
    publish_groups(&mut cache, &tokens[..2], 7);
    assert_eq!(lookup(&cache, 0, &tokens), [7], "under a new name");
}

#[test]
fn a_block_that_comes_back_keeps_its_name() {
    let mut cache = cache_of(&[Some(2)], u64::MAX);
    let tokens = [1, 2, 3, 4, 5, 6];
    publish_groups(&mut cache, &tokens, 1);
    cache.evict(BlockId(1));
    cache.commit();
    publish_groups(&mut cache, &tokens[..2], 7);
    assert_eq!(lookup(&cache, 0, &tokens), [0, 0, 3]);
    assert!(cache.names.of_hash.is_empty());
}
