//! The disk tier of the prefix cache: blocks as files that outlive the process.
//!
//! Guarantees: files are written and read by a thread of their own; a file appears under its name only when it is whole
//! (written beside it, then renamed); a file that is damaged, cut short, foreign or not what its name says is never read
//! as content: it is removed, by name in the log, and its content may be written again; the folder stays within its limit, the files used longest ago going first;
//! what is to be forgotten is not read again, also what waits to be written.
//! It does not decide what is worth keeping: the cache does.

mod file;

pub use file::{FileFault, Format};

use crate::kv::{CachedContent, ContentId};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, UNIX_EPOCH};

/// Jobs that wait for the thread at most.
const MAX_JOBS: usize = 4096;
/// Bytes that wait to be written at most; what comes beyond is not kept.
const MAX_QUEUED_BYTES: u64 = 256 << 20;
const EXTENSION: &str = "kv";

/// Where files go, and how much they may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    pub dir: PathBuf,
    pub max_bytes: u64,
}

/// The folder cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the prefix cache's folder cannot be used: {message} ({})", path.display())]
pub struct FolderFault {
    pub path: PathBuf,
    pub message: String,
}

/// Contents that were asked for, as far as they could be read, in order.
#[derive(Debug)]
pub struct Fetched {
    /// The number under which they were asked for.
    pub ticket: u64,
    pub blocks: Vec<(CachedContent, Vec<u8>)>,
}

/// What is to go.
#[derive(Clone, Debug)]
enum Forget {
    /// This content, and if so said those that follow it.
    One(ContentId, bool),
    AllBut(HashSet<ContentId>),
}

/// Things to forget, each after the first so many jobs.
type Forgets = Arc<Mutex<VecDeque<(u64, Forget)>>>;

enum Job {
    Write(CachedContent, Vec<u8>),
    Read {
        ticket: u64,
        ids: Vec<ContentId>,
    },
    Flush(SyncSender<()>),
    /// Something is to be forgotten.
    Look,
}

/// The files of one model in one format.
#[derive(Debug)]
pub struct DiskTier {
    index: Arc<Mutex<Index>>,
    /// `None` before [`DiskTier::start`].
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    queued_bytes: Arc<AtomicU64>,
    /// Jobs that the thread was given.
    num_jobs: Cell<u64>,
    forgets: Forgets,
    worker: Option<Worker>,
}

/// Which files there are.
#[derive(Debug, Default)]
struct Index {
    /// Content and order of its last use.
    uses: HashMap<ContentId, u64>,
    by_use: BTreeSet<(u64, ContentId)>,
    last_use: u64,
    /// Contents that were given to be kept, or found at the start.
    offered: HashSet<ContentId>,
}

#[derive(Debug)]
struct Worker {
    folder: PathBuf,
    format: Format,
    max_files: u64,
    index: Arc<Mutex<Index>>,
    queued_bytes: Arc<AtomicU64>,
    forgets: Forgets,
}

impl DiskTier {
    /// Looks at what the folder holds for this format; makes it where it is not there.
    pub fn open(config: &DiskConfig, format: Format) -> Result<DiskTier, FolderFault> {
        let folder = config.dir.join(hex(&format.identity[..12])).join(format!("{}", format.block_size));
        let fault = |e: std::io::Error| FolderFault { path: folder.clone(), message: e.to_string() };
        std::fs::create_dir_all(&folder).map_err(fault)?;
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(fault)? {
            let entry = entry.map_err(fault)?;
            let (path, meta) = (entry.path(), entry.metadata().map_err(fault)?);
            match id_of(&path) {
                Some(id) => {
                    let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                    found.push((modified.unwrap_or_default(), id));
                }
                // A file that a process did not live to finish.
                None if path.extension().is_some_and(|x| x == "part") => drop(std::fs::remove_file(&path)),
                None => {}
            }
        }
        found.sort_unstable();
        let mut index = Index::default();
        found.iter().for_each(|(_, id)| index.touch(*id));
        let index = Arc::new(Mutex::new(index));
        let queued_bytes = Arc::new(AtomicU64::new(0));
        let max_files = config.max_bytes / format.file_bytes();
        lock(&index).offered = found.into_iter().map(|(_, id)| id).collect();
        let forgets = Forgets::default();
        let worker = Worker {
            folder,
            format,
            max_files,
            index: index.clone(),
            queued_bytes: queued_bytes.clone(),
            forgets: forgets.clone(),
        };
        let num_jobs = Cell::new(0);
        Ok(DiskTier { index, jobs: None, thread: None, queued_bytes, num_jobs, forgets, worker: Some(worker) })
    }

    /// Starts the thread; `deliver` gets what it reads.
    pub fn start(&mut self, deliver: impl Fn(Fetched) + Send + 'static) -> Result<(), FolderFault> {
        let Some(worker) = self.worker.take() else { return Ok(()) };
        let path = worker.folder.clone();
        let (jobs, queue) = sync_channel(MAX_JOBS);
        let thread = std::thread::Builder::new().name("prefix cache".into());
        let thread = thread.spawn(move || worker.run(&queue, &deliver));
        self.thread = Some(thread.map_err(|e| FolderFault { path, message: e.to_string() })?);
        self.jobs = Some(jobs);
        Ok(())
    }

    /// Files there are.
    pub fn len(&self) -> u64 {
        lock(&self.index).uses.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when there is a file of this content.
    pub fn has(&self, id: &ContentId) -> bool {
        lock(&self.index).uses.contains_key(id)
    }

    /// True when this content was given to be kept before, or was there from the start.
    pub fn was_offered(&self, id: &ContentId) -> bool {
        lock(&self.index).offered.contains(id)
    }

    /// Keeps a content, soon. False when too much waits to be written already.
    pub fn keep(&mut self, content: CachedContent, bytes: &[u8]) -> bool {
        if self.has(&content.id) {
            return true;
        }
        let len = bytes.len() as u64;
        if self.queued_bytes.load(Ordering::Relaxed) + len > MAX_QUEUED_BYTES {
            return false;
        }
        let id = content.id;
        self.queued_bytes.fetch_add(len, Ordering::Relaxed);
        lock(&self.index).offered.insert(id);
        let is_taken = self.give(Job::Write(content, bytes.to_vec()));
        if !is_taken {
            self.queued_bytes.fetch_sub(len, Ordering::Relaxed);
            lock(&self.index).offered.remove(&id);
        }
        is_taken
    }

    /// Asks for contents; they are delivered together. False when the thread cannot take the job.
    pub fn fetch(&self, ticket: u64, ids: Vec<ContentId>) -> bool {
        self.give(Job::Read { ticket, ids })
    }

    fn give(&self, job: Job) -> bool {
        let is_taken = self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok());
        self.num_jobs.set(self.num_jobs.get() + u64::from(is_taken));
        is_taken
    }

    /// Removes a content, what was given to be kept before included, and if so said all that follow it.
    pub fn forget(&self, id: ContentId, with_followers: bool) {
        self.forget_after_jobs(Forget::One(id, with_followers));
    }

    /// Removes everything but these, what was given to be kept before included.
    pub fn forget_all_but(&self, kept: HashSet<ContentId>) {
        self.forget_after_jobs(Forget::AllBut(kept));
    }

    fn forget_after_jobs(&self, forget: Forget) {
        lock(&self.forgets).push_back((self.num_jobs.get(), forget));
        // A thread that is busy looks after each job.
        self.give(Job::Look);
    }

    /// Waits until all that was to be kept is written, for a while at most. False when it took longer.
    pub fn flush(&self, limit: Duration) -> bool {
        if self.jobs.is_none() {
            return true;
        }
        let (done, wait) = sync_channel(1);
        self.give(Job::Flush(done)) && wait.recv_timeout(limit).is_ok()
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        // Without a sender the thread ends after the jobs that wait; nobody waits for it.
        self.jobs = None;
        drop(self.thread.take());
    }
}

impl Worker {
    fn run(&self, queue: &Receiver<Job>, deliver: &(impl Fn(Fetched) + ?Sized)) {
        let mut num_done = 0;
        while let Ok(job) = queue.recv() {
            self.forget_what_is_due(num_done);
            num_done += 1;
            match job {
                Job::Look => {}
                Job::Write(content, bytes) => {
                    self.queued_bytes.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                    if let Err(error) = self.write(&content, &bytes) {
                        tracing::warn!(
                            "the prefix cache could not write {}: {error}",
                            self.path(&content.id).display()
                        );
                    }
                }
                Job::Read { ticket, ids } => deliver(Fetched { ticket, blocks: self.read_all(&ids) }),
                Job::Flush(done) => drop(done.try_send(())),
            }
        }
        self.forget_what_is_due(num_done);
    }

    fn forget_what_is_due(&self, num_done: u64) {
        loop {
            let due = lock(&self.forgets).pop_front_if(|(after, _)| *after <= num_done);
            let Some((_, forget)) = due else { return };
            for id in self.doomed(&forget) {
                let mut index = lock(&self.index);
                let had_file = index.uses.contains_key(&id);
                index.withdraw(&id);
                drop(index);
                if had_file && let Err(error) = remove(&self.path(&id)) {
                    tracing::warn!("the prefix cache could not remove {}: {error}", self.path(&id).display());
                }
            }
        }
    }

    /// What there is of the contents to be forgotten.
    fn doomed(&self, forget: &Forget) -> HashSet<ContentId> {
        let known: Vec<ContentId> = {
            let index = lock(&self.index);
            index.uses.keys().chain(&index.offered).copied().collect()
        };
        match forget {
            Forget::AllBut(kept) => known.into_iter().filter(|id| !kept.contains(id)).collect(),
            Forget::One(id, false) => HashSet::from([*id]),
            Forget::One(id, true) => {
                let parent = |id: &ContentId| file::parent_of(&self.path(id)).ok().flatten();
                let parents: Vec<(ContentId, ContentId)> =
                    known.iter().filter_map(|id| Some((*id, parent(id)?))).collect();
                let mut doomed = HashSet::from([*id]);
                let mut num_doomed = 0;
                while num_doomed < doomed.len() {
                    num_doomed = doomed.len();
                    let next: Vec<ContentId> =
                        parents.iter().filter(|(_, parent)| doomed.contains(parent)).map(|(id, _)| *id).collect();
                    doomed.extend(next);
                }
                doomed
            }
        }
    }

    fn path(&self, id: &ContentId) -> PathBuf {
        self.folder.join(hex(&id.0)).with_extension(EXTENSION)
    }

    /// Whole under its name, or not there.
    fn write(&self, content: &CachedContent, bytes: &[u8]) -> std::io::Result<()> {
        if self.max_files == 0 || lock(&self.index).uses.contains_key(&content.id) {
            return Ok(());
        }
        let path = self.path(&content.id);
        let part = path.with_extension(format!("{}.part", std::process::id()));
        std::fs::write(&part, file::encode(&self.format, content, bytes))?;
        std::fs::rename(&part, &path)?;
        lock(&self.index).touch(content.id);
        self.shrink();
        Ok(())
    }

    fn shrink(&self) {
        loop {
            let oldest = lock(&self.index).pop_oldest(self.max_files);
            let Some(oldest) = oldest else { return };
            if let Err(error) = remove(&self.path(&oldest)) {
                tracing::warn!("the prefix cache could not remove {}: {error}", self.path(&oldest).display());
            }
        }
    }

    /// The blocks of a prefix up to the first that cannot be had: what follows it is of no use, but looked at as well, so
    /// that all of a damaged prefix is written anew the next time it is computed.
    fn read_all(&self, ids: &[ContentId]) -> Vec<(CachedContent, Vec<u8>)> {
        let (mut blocks, mut is_whole) = (Vec::with_capacity(ids.len()), true);
        let (mut num_refused, mut first_refused) = (0, None);
        for id in ids {
            match self.read(id) {
                Ok(Some(block)) if is_whole => blocks.push(block),
                Ok(Some(_)) => {}
                Ok(None) => is_whole = false,
                Err(reason) => {
                    is_whole = false;
                    num_refused += 1;
                    first_refused.get_or_insert((*id, reason));
                }
            }
        }
        if let Some((id, reason)) = first_refused {
            let more = match num_refused {
                1 => String::new(),
                n => format!(" ({} more of the same prefix were removed with it)", n - 1),
            };
            tracing::warn!("the prefix cache removed {}: {reason}{more}", self.path(&id).display());
        }
        blocks
    }

    /// The block in a file; nothing where there is none any more. A file that fails a check is removed, and its content
    /// may be offered again.
    fn read(&self, id: &ContentId) -> Result<Option<(CachedContent, Vec<u8>)>, String> {
        // Forgotten since it was asked for.
        if !lock(&self.index).uses.contains_key(id) {
            return Ok(None);
        }
        let path = self.path(id);
        let found = std::fs::read(&path)
            .map_err(|error| (error.kind() != ErrorKind::NotFound).then(|| error.to_string()))
            .and_then(|file| file::decode(&self.format, id, &file).map_err(|fault| Some(fault.to_string())));
        match found {
            Ok(block) => {
                lock(&self.index).touch(*id);
                Ok(Some(block))
            }
            Err(reason) => {
                lock(&self.index).withdraw(id);
                let Some(reason) = reason else { return Ok(None) };
                match remove(&path) {
                    Ok(()) => Err(reason),
                    // The content, written again, takes its place.
                    Err(error) => Err(format!("{reason}; the file could not be removed: {error}")),
                }
            }
        }
    }
}

impl Index {
    fn touch(&mut self, id: ContentId) {
        self.forget(&id);
        self.last_use += 1;
        self.uses.insert(id, self.last_use);
        self.by_use.insert((self.last_use, id));
    }

    fn forget(&mut self, id: &ContentId) {
        if let Some(used) = self.uses.remove(id) {
            self.by_use.remove(&(used, *id));
        }
    }

    /// There is no such file, and its content was never offered.
    fn withdraw(&mut self, id: &ContentId) {
        self.forget(id);
        self.offered.remove(id);
    }

    fn pop_oldest(&mut self, max_files: u64) -> Option<ContentId> {
        if self.uses.len() as u64 <= max_files {
            return None;
        }
        let (_, id) = self.by_use.first().copied()?;
        self.forget(&id);
        Some(id)
    }
}

/// The content that a file's name says it holds.
fn id_of(path: &Path) -> Option<ContentId> {
    if path.extension()? != EXTENSION {
        return None;
    }
    let name = path.file_stem()?.to_str()?;
    let mut id = [0; 32];
    if name.len() != 64 || !name.is_ascii() {
        return None;
    }
    for (i, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&name[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(ContentId(id))
}

/// Removes a file; one that is gone already is no fault.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::HostSlot;
    use crate::kv::CacheKey;

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
        let fetched = receive.recv_timeout(PATIENCE).expect("delivered");
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
}
