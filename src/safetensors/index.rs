//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. The names are a stranger's: only files right beside
//! the index are opened.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::error::Category;

use super::{Found, blamed, malformed, open_regular, short, unread};
use crate::error::{Error, Result};

/// The longest index that is read: as long as a header may be.
const LONGEST: u64 = 100_000_000;
const SUFFIX: &str = "safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The longest name of a file that there is (Linux's `NAME_MAX`), in bytes.
const LONGEST_NAME: usize = 255;
/// The index's entry that says which tensor is in which file.
const MAP: &str = "weight_map";

/// What is in which file, by the index.
pub(super) struct Index {
    files: BTreeMap<PathBuf, BTreeSet<String>>,
}

impl Index {
    /// The names of what is said to be in a file.
    pub(super) fn of(&self, file: &Path) -> &BTreeSet<String> {
        static NONE: BTreeSet<String> = BTreeSet::new();
        self.files.get(file).unwrap_or(&NONE)
    }

    fn read(path: &Path) -> Result<Self> {
        let what = path.display().to_string();
        let mut text = Vec::new();
        let (file, _) = open_regular(path, &what)?;
        // One more than is allowed, whatever its length was said to be.
        file.take(LONGEST + 1).read_to_end(&mut text).map_err(|error| unread(&what, 0, &error))?;
        if text.len() as u64 > LONGEST {
            let why = format!("more than {LONGEST} bytes are too many for an index");
            return Err(malformed(&what, why));
        }
        Self::parse(&what, &text, path.parent().unwrap_or_else(|| Path::new("")))
    }

    /// `folder` is where its files are.
    fn parse(what: &str, text: &[u8], folder: &Path) -> Result<Self> {
        let mut weights = Weights::default();
        let mut json = serde_json::Deserializer::from_slice(text);
        if let Err(error) = Root(&mut weights).deserialize(&mut json).and_then(|()| json.end()) {
            return Err(weights.blame(what, &error));
        }
        let Some(mut pairs) = weights.pairs else { return Err(no_map(what)) };
        pairs.sort_unstable();
        if let Some(pair) = pairs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let why = "is there twice, and in which file it is nobody can tell; get it again".into();
            return Err(blamed(what, &pair[0].0, why));
        }
        let mut files: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
        for (tensor, file) in pairs {
            let mut parts = Path::new(&file).components();
            let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
            if !is_name || file.len() > LONGEST_NAME {
                let file = short::name(&file);
                let why = format!("is said to be in {file:?}, which is no name of a file beside the index");
                return Err(blamed(what, &tensor, why));
            }
            files.entry(folder.join(file)).or_default().insert(tensor);
        }
        if files.is_empty() {
            return Err(malformed(what, "its \"weight_map\" names no tensor"));
        }
        Ok(Self { files })
    }
}

fn no_map(what: &str) -> Error {
    malformed(what, "it has no object \"weight_map\", which says which tensor is in which file")
}

/// Tensors and their files, read one by one: an index may be long, and be anything else.
#[derive(Default)]
struct Weights {
    /// `None`: there is no map.
    pairs: Option<Vec<(String, String)>>,
    /// The tensor whose file is being read.
    at: Option<String>,
}

impl Weights {
    fn blame(&self, what: &str, error: &serde_json::Error) -> Error {
        let said = short::said(error);
        match &self.at {
            _ if error.classify() != Category::Data => {
                malformed(what, format!("it is no JSON ({said}); get it again"))
            }
            Some(tensor) => {
                let why = format!("is said to be in what is no name of a file beside the index ({said})");
                blamed(what, tensor, why)
            }
            None if self.pairs.is_some() => {
                let twice =
                    "is there twice, and which of the two is meant nobody can tell; get the file again";
                malformed(what, format!("its {MAP:?} {twice}"))
            }
            None => no_map(what),
        }
    }
}

/// The index itself.
struct Root<'a>(&'a mut Weights);

impl<'de> DeserializeSeed<'de> for Root<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Root<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an index")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key == MAP {
                map.next_value_seed(&mut *self.0)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Weights {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Weights {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of files by tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        if self.pairs.is_some() {
            // `blame` says so.
            return Err(A::Error::custom("it is there twice"));
        }
        let mut pairs = Vec::new();
        while let Some(tensor) = map.next_key()? {
            self.at = Some(tensor);
            let file = map.next_value()?;
            pairs.extend(self.at.take().map(|tensor| (tensor, file)));
        }
        self.pairs = Some(pairs);
        Ok(())
    }
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<Found> {
    if path.is_dir() {
        let index = path.join(INDEX);
        // A link that leads nowhere has the name, too: without the index more would be loaded than it names.
        return match std::fs::symlink_metadata(&index) {
            Err(error) if error.kind() == ErrorKind::NotFound => of_folder(path),
            _ => of_index(&index),
        };
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => of_index(path),
        false => Ok(Found { files: vec![path.to_owned()], index: None }),
    }
}

fn of_index(path: &Path) -> Result<Found> {
    let index = Index::read(path)?;
    Ok(Found { files: index.files.keys().cloned().collect(), index: Some(index) })
}

fn of_folder(path: &Path) -> Result<Found> {
    let what = path.display().to_string();
    let entries = std::fs::read_dir(path).map_err(|error| unread(&what, 0, &error))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(|error| unread(&what, 0, &error))?.path();
        // (A link that leads nowhere is a file that is missing.)
        if file.extension().is_some_and(|end| end == SUFFIX) && !file.is_dir() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(malformed(
            &what,
            format!("there is neither {INDEX} nor a file that ends in .{SUFFIX} in it"),
        ));
    }
    files.sort();
    complete(&what, &files)?;
    Ok(Found { files, index: None })
}

/// Where files say in their names that they are one of so many (`model-00002-of-00003`), all of them have to be there.
fn complete(what: &str, files: &[PathBuf]) -> Result<()> {
    // Of each set, named by what its files' names start with and how many there are: those that are there.
    let mut sets: BTreeMap<(&str, &str), BTreeSet<u64>> = BTreeMap::new();
    for file in files {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let Some((front, of)) = stem.rsplit_once("-of-") else { continue };
        let Some((set, number)) = front.rsplit_once('-') else { continue };
        if let (Ok(_), Ok(number)) = (of.parse::<u64>(), number.parse()) {
            sets.entry((set, of)).or_default().insert(number);
        }
    }
    for ((set, of), there) in sets {
        let count: u64 = of.parse().unwrap_or_default();
        // Most count from one.
        let from = u64::from(!there.contains(&0));
        if let Some(missing) = (from..count.saturating_add(from)).find(|number| !there.contains(number)) {
            let width = of.len();
            return Err(malformed(
                what,
                format!("{set}-{missing:0width$}-of-{of}.{SUFFIX} is missing in it; get it too"),
            ));
        }
    }
    Ok(())
}
