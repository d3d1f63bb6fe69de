//! The C interface as a program in C uses it: the header, the shared library and the archive.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use larder_runtime::{GenerateOptions, GeneratedText, LoadOptions, Model, ModelStats, TextPiece};

const PROMPT: &str = "The old man looked at the door, and";
const LOAD: &str = r#"{"cache": "16x", "threads": 2}"#;
const GENERATE: &str = r#"{"max-tokens": 30, "temperature": 0}"#;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn demo() -> PathBuf {
    repository().join("models/demo")
}

#[test]
fn the_header_is_that_of_the_functions() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::Builder::new().with_src(here.join("src/lib.rs")).with_config(config).generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = here.join("include/larder.h");
    assert!(std::fs::read_to_string(&path).unwrap() == made, "{} is not this:\n{made}", path.display());
}

/// Where cargo builds the libraries of this package: beside this test.
fn libraries() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    for name in ["liblarder.so", "liblarder.a"] {
        assert!(deps.join(name).exists(), "no {name} in {}", deps.display());
    }
    deps
}

/// Compiles examples/c/generate.c, with more warnings than people have.
fn compile(to: &Path, link: &[&str]) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wstrict-prototypes", "-Werror"])
        .arg("-I")
        .arg(repository().join("crates/larder-c/include"))
        .arg(repository().join("examples/c/generate.c"))
        .args(link)
        .arg("-o")
        .arg(to)
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}; a C compiler is needed"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn run(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).env("LD_LIBRARY_PATH", libraries()).output().unwrap()
}

/// GeneratedText and counts that the program printed behind the text.
fn printed(output: &Output) -> (GeneratedText, ModelStats) {
    let said = String::from_utf8_lossy(&output.stderr);
    let mut lines = said.lines().filter(|line| line.starts_with('{'));
    let mut next = || lines.next().unwrap_or_else(|| panic!("{said}")).to_owned();
    (serde_json::from_str(&next()).unwrap(), serde_json::from_str(&next()).unwrap())
}

#[test]
fn a_program_in_c_gets_the_text_of_the_engine() {
    let options = LoadOptions::from_json(LOAD).unwrap();
    let mut model = Model::load_with(demo(), &options).unwrap();
    let mut pieces = String::new();
    let mut piece = |piece: TextPiece| {
        pieces.push_str(piece.text);
        true
    };
    let own = model.generate_with(PROMPT, &GenerateOptions::from_json(GENERATE).unwrap(), &mut piece).unwrap();
    assert_eq!((own.tokens.len(), &own.text), (30, &pieces));
    let (folder, libraries) = (tempfile::tempdir().unwrap(), libraries());
    let archive = libraries.join("liblarder.a");
    let from = ["-L", libraries.to_str().unwrap()];
    let model = demo();
    for (name, link) in [
        ("shared", &[from[0], from[1], "-llarder"][..]),
        ("static", &[archive.to_str().unwrap(), "-lm", "-ldl", "-lpthread"]),
    ] {
        let program = folder.path().join(name);
        compile(&program, link);
        let output = run(&program, &[model.to_str().unwrap(), PROMPT, LOAD, GENERATE]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8(output.stdout.clone()).unwrap(), own.text, "{name}");
        let (answer, stats) = printed(&output);
        assert_eq!(
            (&answer.tokens, &answer.finish, answer.prompt_tokens),
            (&own.tokens, &own.finish, own.prompt_tokens)
        );
        assert!(stats.misses > 0 && stats.hits > 0 && stats.read_bytes > 0 && stats.slots > 0, "{stats:?}");
    }
}

#[cfg(feature = "vision")]
#[test]
fn a_program_in_c_shows_images() {
    let vision = repository().join("tests/vision");
    let (seeing, pictures) =
        (vision.join("qwen3_vl_moe"), ["odd", "dot"].map(|name| vision.join(format!("images/{name}.png"))));
    let load = r#"{"context": 512, "threads": 2}"#;
    let written = r#"{"max-tokens": 12, "temperature": 0, "ignore-eos": true}"#;
    let mut model = Model::load_with(&seeing, &LoadOptions::from_json(load).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    compile(&program, &["-L", libraries().to_str().unwrap(), "-llarder"]);
    let texts = [0, 1, 2].map(|images| {
        let pictures = &pictures[..images];
        let options = GenerateOptions {
            images: pictures.iter().map(|path| larder_runtime::PictureFile::read(path).unwrap()).collect(),
            ..GenerateOptions::from_json(written).unwrap()
        };
        let own = model.generate_with("What is this?", &options, &mut |_: TextPiece| true).unwrap();
        let arguments = [seeing.to_str().unwrap(), "What is this?", load, written];
        let paths = pictures.iter().map(|path| path.to_str().unwrap());
        let output = run(&program, &arguments.into_iter().chain(paths).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8(output.stdout.clone()).unwrap(), own.text, "{images} images");
        let (answer, _) = printed(&output);
        assert_eq!((&answer.tokens, answer.prompt_tokens), (&own.tokens, own.prompt_tokens));
        own.prompt_tokens
    });
    assert!(texts.is_sorted_by(|less, more| less < more), "{texts:?}");
}

#[test]
fn an_error_is_a_sentence_and_no_crash() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    compile(&program, &["-L", libraries().to_str().unwrap(), "-llarder"]);
    let model = demo();
    let model = model.to_str().unwrap();
    let long = "word ".repeat(5000);
    let picture = repository().join("tests/vision/images/dot.png");
    for (arguments, fault) in [
        (&["/nonexistent", "a"][..], "/nonexistent"),
        (&[model, "a", "{"], "options to load are not valid"),
        (&[model, "a", r#"{"cash": 1}"#], "there is no setting cash"),
        (&[model, "a", r#"{"cache": "1K"}"#], "--cache"),
        (&[model, "a", r#"{"eviction": "learned", "evictor": "/nowhere"}"#], "/nowhere"),
        (&[model, "", LOAD], "the prompt has"),
        (&[model, &long, r#"{"context": 64}"#], "the context of 64 tokens"),
        (&[model, "a", LOAD, r#"{"max-tokens": -1}"#], "options to generate are not valid"),
        (&[model, "a", LOAD, r#"{"temperature": -1}"#], "temperature is -1"),
        (&[model, "a", LOAD, GENERATE, picture.to_str().unwrap()], "this model takes no images"),
    ] {
        let output = run(&program, arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains(fault), "{arguments:?}: {said}");
    }
}
