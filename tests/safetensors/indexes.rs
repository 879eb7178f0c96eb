//! Which files make up a checkpoint.

use pinpool::Error;
use pinpool::safetensors::Checkpoint;

use super::{Folder, Made, Rig, arrived, file, made};

fn refused(path: &std::path::Path, tensor: Option<&str>, cause: &str) {
    match Checkpoint::open(path) {
        Err(Error::Malformed { tensor: named, why, .. }) => {
            assert!(named.as_deref() == tensor && why.contains(cause), "{named:?}: {why}");
        }
        other => panic!("{cause}: {other:?}"),
    }
}

#[test]
fn an_index_says_which_tensors_are_in_which_file() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let first = [made("a", "F32", &[30], 1), made("old", "F32", &[4], 2), made("b", "U8", &[5], 3)];
    let second = [made("c", "BF16", &[70, 1000], 4)];
    folder.put("model-1.safetensors", file(&first));
    folder.put("model-2.safetensors", file(&second));
    // Beside them, and not named.
    folder.put("other.safetensors", "not a checkpoint at all");
    let map = r#"{"metadata":{"total_size":1},"weight_map":{"c":"model-2.safetensors","a":"model-1.safetensors","b":"model-1.safetensors"}}"#;
    let index = folder.put("model.safetensors.index.json", map);
    let pipeline = rig.pipeline();
    for path in [&*index, folder.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        let expected: Vec<&Made> = vec![&first[0], &first[2], &second[0]];
        assert_eq!(checkpoint.tensors().map(|t| t.name()).collect::<Vec<_>>(), ["a", "b", "c"]);
        let got = checkpoint.loader(&pipeline).load().unwrap();
        arrived(&pipeline, &got, &expected);
    }
    rig.all_is_back();
}

#[test]
fn an_index_that_lies_is_refused() {
    let folder = Folder::new();
    folder.put("1.safetensors", file(&[made("a", "U8", &[3], 1)]));
    let with = |text: &str| folder.put("model.safetensors.index.json", text);
    refused(
        &with(r#"{"weight_map":{"a":"1.safetensors","b":"1.safetensors"}}"#),
        Some("b"),
        "does not have it",
    );
    for outside in ["../1.safetensors", "/etc/passwd", "sub/1.safetensors", "", ".", ".."] {
        refused(&with(&format!(r#"{{"weight_map":{{"a":"{outside}"}}}}"#)), Some("a"), "no name of a file");
    }
    refused(&with(r#"{"weight_map":{"a":7}}"#), Some("a"), "no name of a file");
    refused(&with(r#"{"weight_map":{}}"#), None, "names no tensor");
    refused(&with(r#"{"weight_map":[]}"#), None, "weight_map");
    refused(&with("{"), None, "no JSON");
    let missing = Checkpoint::open(with(r#"{"weight_map":{"a":"2.safetensors"}}"#)).map(drop).unwrap_err();
    assert!(matches!(&missing, Error::Read { what, .. } if what.ends_with("2.safetensors")), "{missing}");
}

#[test]
fn a_folder_without_an_index_is_all_of_its_files() {
    let folder = Folder::new();
    refused(folder.path(), None, "neither");
    folder.put("b.safetensors", file(&[made("b", "U8", &[3], 1)]));
    folder.put("a.safetensors", file(&[made("z", "U8", &[3], 1)]));
    folder.put("config.json", "{}");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.tensors().map(|t| t.name()).collect::<Vec<_>>(), ["z", "b"]);
    // What two of them have is nobody's.
    folder.put("c.safetensors", file(&[made("b", "U8", &[3], 1)]));
    refused(folder.path(), Some("b"), "b.safetensors too");

    assert!(matches!(Checkpoint::open_files::<&str>(&[]), Err(Error::Empty)));
    assert!(matches!(Checkpoint::open(folder.path().join("nowhere")), Err(Error::Read { .. })));
    refused(std::path::Path::new("/dev/null"), None, "no regular file");
}
