//! What was found, in a file for each adapter and driver, and the choices that are shipped for a class.
//!
//! Guarantees: a file is written beside and renamed; one that cannot be read, is of another version or tells of another
//! adapter, driver or other shaders is as if it were not there, with a warning that names it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::Outcome;
use crate::gpu::{GpuCaps, sources};
use crate::kernels::{Choices, DeviceClass};

/// Of the file.
const VERSION: u32 = 1;
/// What makes shaders into machine code.
const WGPU_VERSION: &str = "30.0.2";
/// Choices by class, then by product without its shape.
const SHIPPED: &str = include_str!("../../../assets/tuning.json");

/// What times hang on besides the product.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adapter {
    pub name: String,
    pub backend: String,
    pub vendor: u32,
    pub device: u32,
    pub driver: String,
    pub wgpu: String,
    /// Hash of all shader files.
    pub shaders: String,
    pub class: String,
    /// Lanes of a subgroup.
    pub lanes: Option<u32>,
}

impl Adapter {
    pub fn of(caps: &GpuCaps) -> Adapter {
        let texts = sources::SHARED.iter().chain(sources::KERNELS);
        let text: String = texts.flat_map(|source| [source.name, "\n", source.text]).collect();
        Adapter {
            name: caps.name.clone(),
            backend: caps.backend.clone(),
            vendor: caps.vendor,
            device: caps.device,
            driver: caps.driver.clone(),
            wgpu: WGPU_VERSION.into(),
            shaders: format!("{:016x}", xxh3_64(text.as_bytes())),
            class: DeviceClass::of(caps).name.into(),
            lanes: caps.subgroup_size,
        }
    }

    /// The file of its table in a folder.
    pub fn path(&self, dir: &Path) -> PathBuf {
        dir.join(format!("{:016x}.json", xxh3_64(format!("{self:?}").as_bytes())))
    }
}

/// What was found about a key, in text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub chosen: String,
    /// Median time of a dispatch of each way that was measured.
    pub us: BTreeMap<String, f64>,
    /// Ways that must not be taken, and why.
    pub banned: BTreeMap<String, String>,
}

impl Entry {
    pub fn of(outcome: &Outcome) -> Entry {
        let candidates = || outcome.candidates.iter();
        Entry {
            chosen: outcome.chosen.clone(),
            us: candidates().filter_map(|c| Some((c.way.clone(), c.us?))).collect(),
            banned: candidates().filter_map(|c| Some((c.way.clone(), c.ban.clone()?))).collect(),
        }
    }
}

/// A table of one adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    version: u32,
    pub adapter: Adapter,
    /// By the key of a product, or of a kernel of attention, as text.
    pub products: BTreeMap<String, Entry>,
}

impl Table {
    /// Nothing found yet.
    pub fn empty(adapter: Adapter) -> Table {
        Table { version: VERSION, adapter, products: BTreeMap::new() }
    }

    /// The adapter's table in a folder; the string is a warning.
    pub fn load(dir: &Path, adapter: Adapter) -> (Table, Option<String>) {
        let path = adapter.path(dir);
        let unusable =
            |fault: String| Some(format!("the table of measured kernels is not used: {fault}: {}", path.display()));
        let warning = match std::fs::read_to_string(&path) {
            Err(fault) if fault.kind() == std::io::ErrorKind::NotFound => None,
            Err(fault) => unusable(fault.to_string()),
            Ok(text) => match serde_json::from_str::<Table>(&text) {
                Err(fault) => unusable(fault.to_string()),
                Ok(table) if table.version != VERSION => unusable(format!("its version is {}", table.version)),
                Ok(table) if table.adapter != adapter => unusable("it tells of another adapter or driver".into()),
                Ok(table) => return (table, None),
            },
        };
        (Table::empty(adapter), warning)
    }

    /// Writes it to its place in a folder, which is made where there is none.
    pub fn save(&self, dir: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let path = self.adapter.path(dir);
        let beside = path.with_extension(format!("{}.partial", std::process::id()));
        std::fs::write(&beside, serde_json::to_string_pretty(self)?)?;
        std::fs::rename(&beside, &path).inspect_err(|_| drop(std::fs::remove_file(&beside)))
    }

    /// What it chooses, and where it says nothing what is shipped for the class.
    pub fn choices(&self) -> Choices {
        let mut chosen = shipped(&self.adapter.class);
        let is_allowed = |(_, entry): &(&String, &Entry)| !entry.banned.contains_key(&entry.chosen);
        let own = self.products.iter().filter(is_allowed);
        chosen.extend(own.map(|(key, entry)| (key.clone(), entry.chosen.clone())));
        Choices::new(chosen)
    }
}

/// Choices that are shipped for a class, by product; empty where there are none.
fn shipped(class: &str) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, BTreeMap<String, String>> =
        serde_json::from_str(SHIPPED).expect("a test reads the file");
    all.remove(class).unwrap_or_default()
}

/// Adapters of the class need no measurement at start: what is not shipped is best as the class begins with it.
pub fn is_shipped(class: &DeviceClass) -> bool {
    !shipped(class.name).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Class;
    use crate::kernels::device_class::DEVICE_CLASSES;
    use crate::kernels::matmul::{COLUMNS, Fusion, Precision};
    use crate::kernels::pack::Format;
    use crate::kernels::tile::ProductKey;
    use crate::kernels::variants::WEIGHT_TYPES;

    fn adapter(driver: &str) -> Adapter {
        Adapter {
            name: "a card".into(),
            backend: "vulkan".into(),
            vendor: 1,
            device: 2,
            driver: driver.into(),
            wgpu: WGPU_VERSION.into(),
            shaders: "0".into(),
            class: "subgroup".into(),
            lanes: Some(32),
        }
    }

    fn table(driver: &str) -> Table {
        let entry = Entry {
            chosen: "C1 R1 U2".into(),
            us: BTreeMap::from([("C1 R1 U2".into(), 12.5)]),
            banned: BTreeMap::from([("C1 R2 U2".into(), "gives other bits".into())]),
        };
        Table { products: BTreeMap::from([("a product".into(), entry)]), ..Table::empty(adapter(driver)) }
    }

    #[test]
    fn a_table_is_read_back_as_it_was_written_and_nothing_stays_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("tuning");
        assert_eq!(Table::load(&at, adapter("1")), (Table::empty(adapter("1")), None), "no file, no warning");
        table("1").save(&at).unwrap();
        table("1").save(&at).unwrap();
        assert_eq!(Table::load(&at, adapter("1")), (table("1"), None));
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 1);
        assert_eq!(
            Table::load(&at, adapter("2")),
            (Table::empty(adapter("2")), None),
            "another driver has another file"
        );
    }

    #[test]
    fn a_damaged_or_foreign_file_is_ignored_with_a_warning_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = adapter("1").path(dir.path());
        let check = |text: &str, fault: &str| {
            std::fs::write(&path, text).unwrap();
            let (found, warning) = Table::load(dir.path(), adapter("1"));
            let warning = warning.expect("a warning");
            assert_eq!(found, Table::empty(adapter("1")), "{text}");
            assert!(warning.contains(fault) && warning.contains(&path.display().to_string()), "{warning}");
        };
        check("", "EOF");
        check("{\"version\": 1}", "missing field");
        let text = serde_json::to_string(&table("1")).unwrap();
        check(&text[..text.len() / 2], "EOF");
        check(&text.replace("\"version\":1", "\"version\":7"), "its version is 7");
        check(&serde_json::to_string(&table("2")).unwrap(), "another adapter or driver");
    }

    #[test]
    fn a_banned_way_in_a_file_is_not_chosen() {
        let mut banned = table("1");
        banned.products.values_mut().for_each(|entry| entry.chosen = "C1 R2 U2".into());
        let text = |table: &Table| format!("{:?}", table.choices());
        assert!(text(&table("1")).contains("C1 R1 U2"));
        assert!(!text(&banned).contains("C1 R2 U2"));
    }

    #[test]
    fn shipped_choices_are_of_classes_that_exist() {
        let all: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_str(SHIPPED).unwrap();
        assert!(all.keys().all(|class| DEVICE_CLASSES.iter().any(|row| row.name == class)), "{all:?}");
        let products = WEIGHT_TYPES.into_iter().flat_map(|dtype| {
            let key = ProductKey {
                format: Format::of(dtype),
                precision: Precision::F32,
                n: 576,
                k: 576,
                fusion: Fusion::default(),
                tokens: 1,
            };
            let precisions = [Precision::F32, Precision::I8].into_iter();
            precisions.flat_map(move |precision| COLUMNS.map(|tokens| ProductKey { precision, tokens, ..key }))
        });
        let products: Vec<ProductKey> = products.collect();
        for (name, tile) in all.values().flatten() {
            let key = products.iter().find(|key| key.general() == *name);
            let key = key.unwrap_or_else(|| panic!("{name} is no product"));
            let tiles = key.candidates(Class::Subgroup(8), true);
            assert!(tiles.iter().any(|t| t.to_string() == *tile), "{tile} is no way of {name}");
        }
        assert!(DEVICE_CLASSES.iter().filter(|class| is_shipped(class)).any(|class| class.name == "cpu"));
    }

    #[test]
    fn the_version_of_wgpu_is_the_one_that_is_built_in() {
        let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock")).unwrap();
        assert!(lock.contains(&format!("name = \"wgpu\"\nversion = \"{WGPU_VERSION}\"\n")));
    }
}
