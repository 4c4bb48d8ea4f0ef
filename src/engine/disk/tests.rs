//! The disk tier by itself, and two of them on one folder.

use super::folder::EXTENSION;
use super::*;
use crate::ids::HostSlot;
use crate::kv::CacheKey;
use std::path::Path;
use std::sync::atomic::AtomicBool;

const FORMAT: Format = Format { identity: [7; 32], block_size: 2, bytes_per_block: 8 };
const PATIENCE: Duration = Duration::from_secs(20);

fn content(n: u32) -> CachedContent {
    let key = CacheKey::default();
    let (parent, tokens) = (ContentId::root(key), vec![n, n]);
    CachedContent { host: HostSlot(u32::MAX), id: parent.child(&tokens), parent, key, hash: 1, tokens }
}

fn open(dir: &Path, max_files: u64) -> (DiskTier, Receiver<Fetched>) {
    let config = DiskConfig { dir: dir.to_path_buf(), max_bytes: max_files * FORMAT.file_bytes() };
    let mut tier = DiskTier::open(&config, FORMAT).expect("a folder");
    let (send, receive) = sync_channel(8);
    tier.start(move |fetched| drop(send.send(fetched))).expect("a thread");
    (tier, receive)
}

fn fetch(tier: &DiskTier, receive: &Receiver<Fetched>, contents: &[u32]) -> Vec<u32> {
    assert!(tier.fetch(5, contents.iter().map(|n| content(*n).id).collect()));
    let mut deliveries = std::iter::repeat_with(|| receive.recv_timeout(PATIENCE).expect("delivered"));
    let fetched = deliveries.find(|fetched| fetched.ticket != Fetched::NEWS).expect("endless");
    assert_eq!(fetched.ticket, 5);
    fetched.blocks.iter().for_each(|(content, bytes)| assert_eq!(bytes, &[content.tokens[0] as u8; 8]));
    fetched.blocks.iter().map(|(content, _)| content.tokens[0]).collect()
}

#[test]
fn what_was_kept_is_found_by_the_next_process_and_damage_is_skipped() {
    let dir = tempfile::tempdir().expect("a folder");
    let (mut tier, _receive) = open(dir.path(), 10);
    for n in [1, 2, 3] {
        assert!(tier.keep(content(n), &[n as u8; 8]));
    }
    assert!(tier.flush(PATIENCE));
    drop(tier);
    let (tier, receive) = open(dir.path(), 10);
    assert_eq!((tier.len(), tier.was_offered(&content(2).id)), (3, true));
    assert_eq!(fetch(&tier, &receive, &[1, 2, 3]), [1, 2, 3]);
    let folder = dir.path().join(hex(&[7; 12])).join("2");
    let path = folder.join(hex(&content(2).id.0)).with_extension(EXTENSION);
    let mut bytes = std::fs::read(&path).expect("the file is there");
    bytes[150] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    assert_eq!(fetch(&tier, &receive, &[1, 2, 3]), [1], "what follows a damaged block is of no use");
    assert!(!tier.has(&content(2).id) && tier.has(&content(3).id));
}

#[test]
fn files_that_fail_a_check_are_removed_and_their_contents_can_be_kept_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let (mut tier, receive) = open(dir.path(), 10);
    let all = [1, 2, 3, 4, 5];
    let keep = |tier: &mut DiskTier| {
        let missing: Vec<u32> = all.into_iter().filter(|n| !tier.was_offered(&content(*n).id)).collect();
        missing.iter().for_each(|n| assert!(tier.keep(content(*n), &[*n as u8; 8])));
        assert!(tier.flush(PATIENCE));
        missing
    };
    assert_eq!(keep(&mut tier), all);
    let folder = dir.path().join(hex(&[7; 12])).join("2");
    let path = |n: u32| folder.join(hex(&content(n).id.0)).with_extension(EXTENSION);
    let whole = std::fs::read(path(1)).expect("the file is there");
    let mut flipped = whole.clone();
    flipped[150] ^= 1;
    std::fs::write(path(1), flipped).expect("written");
    std::fs::write(path(2), &whole[..whole.len() / 2]).expect("written");
    std::fs::write(path(3), []).expect("written");
    std::fs::write(path(4), &whole).expect("written");
    assert_eq!(fetch(&tier, &receive, &all), [] as [u32; 0]);
    assert_eq!(all.map(|n| path(n).exists()), [false, false, false, false, true]);
    assert_eq!(all.map(|n| tier.was_offered(&content(n).id)), [false, false, false, false, true]);
    assert_eq!(keep(&mut tier), all[..4]);
    drop(tier);
    let (tier, receive) = open(dir.path(), 10);
    assert_eq!(fetch(&tier, &receive, &all), all, "the next start is warm");
    std::fs::remove_file(path(2)).expect("it was there");
    assert_eq!(fetch(&tier, &receive, &all), [1], "a file that is gone is no fault");
    assert!(!tier.was_offered(&content(2).id));
}

#[test]
fn the_folder_stays_within_its_limit_and_the_last_used_stay() {
    let dir = tempfile::tempdir().expect("a folder");
    let (mut tier, receive) = open(dir.path(), 2);
    for n in [1, 2] {
        assert!(tier.keep(content(n), &[n as u8; 8]));
    }
    assert_eq!(fetch(&tier, &receive, &[1]), [1]);
    assert!(tier.keep(content(3), &[3; 8]) && tier.flush(PATIENCE));
    assert_eq!([1, 2, 3].map(|n| tier.has(&content(n).id)), [true, false, true]);
    let files = std::fs::read_dir(dir.path().join(hex(&[7; 12])).join("2")).expect("a folder").count();
    assert_eq!(files, 2);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let config = DiskConfig { dir: file.path().to_path_buf(), max_bytes: 1 << 20 };
    let fault = DiskTier::open(&config, FORMAT).expect_err("a file is no folder").to_string();
    assert!(fault.contains(&file.path().display().to_string()), "{fault}");
}

fn files(dir: &Path) -> Vec<String> {
    let folder = std::fs::read_dir(dir.join(hex(&[7; 12])).join("2")).expect("a folder");
    folder.map(|entry| entry.expect("an entry").file_name().into_string().expect("plain")).collect()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn two_processes_share_a_folder_and_its_limit() {
    let dir = tempfile::tempdir().expect("a folder");
    let (one, _) = open(dir.path(), 8);
    let (two, _) = open(dir.path(), 8);
    std::thread::scope(|scope| {
        for (mut tier, first) in [(one, 0), (two, 100)] {
            scope.spawn(move || {
                (first..first + 40).for_each(|n| assert!(tier.keep(content(n), &[n as u8; 8])));
                assert!(tier.flush(PATIENCE));
            });
        }
    });
    assert_eq!(files(dir.path()).len(), 8, "{:?}", files(dir.path()));
    let (mut three, receive) = open(dir.path(), 8);
    let (mut four, _) = open(dir.path(), 8);
    assert_eq!(three.len(), 8);
    assert!(four.keep(content(7), &[7; 8]) && four.flush(PATIENCE));
    eventually("what another wrote is known", || three.has(&content(7).id));
    assert_eq!(fetch(&three, &receive, &[7]), [7]);
    assert!(three.keep(content(8), &[8; 8]) && three.flush(PATIENCE));
    assert_eq!((three.len(), files(dir.path()).len()), (8, 8));
}

#[test]
fn a_folder_that_is_deleted_is_made_again_and_what_was_in_it_may_be_offered_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let (mut tier, receive) = open(dir.path(), 8);
    assert!(tier.keep(content(1), &[1; 8]) && tier.flush(PATIENCE));
    eventually("the new file is told", || receive.try_recv().is_ok_and(|told| told.ticket == Fetched::NEWS));
    std::fs::remove_dir_all(dir.path().join(hex(&[7; 12]))).expect("removed");
    eventually("the loss is told", || receive.try_recv().is_ok_and(|told| told.ticket == Fetched::NEWS));
    assert_eq!((tier.len(), tier.was_offered(&content(1).id)), (0, false));
    assert!(tier.keep(content(1), &[1; 8]) && tier.flush(PATIENCE));
    assert_eq!((tier.len(), files(dir.path()).len()), (1, 1));
}

static IS_FULL: AtomicBool = AtomicBool::new(true);

#[test]
fn a_full_disk_leaves_no_parts_and_is_tried_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = DiskConfig { dir: dir.path().to_path_buf(), max_bytes: 1 << 20 };
    let mut tier = DiskTier::open(&config, FORMAT).expect("a folder");
    tier.worker.as_mut().expect("not started").folder.write_file = |path, bytes| {
        let is_full = IS_FULL.load(Ordering::Relaxed);
        std::fs::write(path, &bytes[..if is_full { 20 } else { bytes.len() }])?;
        if is_full { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    };
    tier.start(|_| {}).expect("a thread");
    for n in 0..20 {
        tier.keep(content(n), &[n as u8; 8]);
    }
    assert!(tier.flush(PATIENCE));
    assert_eq!(files(dir.path()), [] as [String; 0]);
    assert!(!tier.was_offered(&content(0).id) && !tier.keep(content(0), &[0; 8]), "later");
    IS_FULL.store(false, Ordering::Relaxed);
    eventually("it is tried again", || tier.keep(content(0), &[0; 8]));
    assert!(tier.flush(PATIENCE) && tier.keep(content(1), &[1; 8]) && tier.flush(PATIENCE));
    assert_eq!(files(dir.path()).len(), 2);
}
