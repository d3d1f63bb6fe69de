//! A sequence that goes back and takes another way is one that took it at once.

use larder_engine::{Session, TokenInput};

use crate::support::golden_models;
use crate::support::reference::load;

const ROOM: usize = 256;
const FIRST: [u32; 12] = [5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 90, 33];
const OTHER: [u32; 9] = [44, 2, 9, 77, 102, 5, 5, 31, 8];

#[test]
fn a_rewound_sequence_is_a_fresh_one() {
    let (mut kept, mut read_again) = (0, 0);
    for folder in golden_models() {
        let mut loaded = load(&folder, "config.json");
        let mut fresh = |tokens: &[u32]| {
            Session::new(&loaded.decoder, &mut loaded.experts, ROOM)
                .forward(&TokenInput::prompt(tokens).in_chunks(5), &mut ())
                .unwrap()
        };
        let lens = [0, 1, 4, 7, 11];
        let want: Vec<Vec<f32>> = lens.iter().map(|len| fresh(&[&FIRST[..*len], &OTHER].concat())).collect();
        let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
        for (len, want) in lens.into_iter().zip(want) {
            let back = session.rewind(0);
            assert_eq!((back, session.tokens().len()), (0, 0));
            session.forward(&TokenInput::prompt(&FIRST).in_chunks(5), &mut ()).unwrap();
            session.forward(&TokenInput::decode(&OTHER[..1]), &mut ()).unwrap();
            let remembered = session.rewind(len);
            assert!(remembered == len || remembered == 0, "{}: {remembered} of {len}", folder.display());
            assert_eq!(session.tokens(), &FIRST[..len]);
            kept += usize::from(remembered > 0);
            read_again += usize::from(remembered < len);
            let got = session.forward(&TokenInput::prompt(&OTHER).in_chunks(3), &mut ()).unwrap();
            assert_eq!(got, want, "{} from {len} on", folder.display());
        }
    }
    assert!(kept > 0 && read_again > 0, "{kept} kept, {read_again} read again");
}

#[test]
fn positions_that_turn_otherwise_are_read_again() {
    // phimoe turns its positions otherwise beyond the length that it was trained for.
    let folder = golden_models().into_iter().find(|folder| folder.ends_with("phimoe")).unwrap();
    let mut loaded = load(&folder, "config.json");
    let at = (1..512).find(|n| !loaded.decoder.kv_valid_after_growth(1, *n)).expect("a length at which they do");
    let long: Vec<u32> = (0..at as u32 + 3).map(|i| i * 7 % 97).collect();
    let short = [&long[..4], &OTHER[..2]].concat();
    let room = long.len() + 8;
    let want = Session::new(&loaded.decoder, &mut loaded.experts, room)
        .forward(&TokenInput::prompt(&short).in_chunks(99), &mut ())
        .unwrap();
    let mut session = Session::new(&loaded.decoder, &mut loaded.experts, room);
    session.forward(&TokenInput::prompt(&long).in_chunks(16), &mut ()).unwrap();
    session.rewind(4);
    assert_eq!(session.forward(&TokenInput::prompt(&OTHER[..2]).in_chunks(16), &mut ()).unwrap(), want);
}

#[test]
fn a_shifted_sequence_is_a_fresh_one() {
    for folder in golden_models() {
        let mut loaded = load(&folder, "config.json");
        let all = [&FIRST[..], &OTHER].concat();
        for keep in [0, 4, 11] {
            let dropped = (all.len() - keep).div_ceil(2);
            let kept = [&all[..keep], &all[keep + dropped..], &[7]].concat();
            let want = Session::new(&loaded.decoder, &mut loaded.experts, ROOM)
                .forward(&TokenInput::prompt(&kept).in_chunks(5), &mut ())
                .unwrap();
            let mut session = Session::new(&loaded.decoder, &mut loaded.experts, all.len());
            session.forward(&TokenInput::prompt(&FIRST).in_chunks(5), &mut ()).unwrap();
            OTHER.iter().for_each(|id| _ = session.forward(&TokenInput::decode(&[*id]), &mut ()).unwrap());
            assert_eq!((session.remaining(), session.shift(keep).unwrap()), (0, Some(keep..keep + dropped)));
            let got = session.forward(&TokenInput::decode(&[7]), &mut ()).unwrap();
            assert_eq!(session.tokens(), kept);
            assert_eq!(got, want, "{} keeping {keep}", folder.display());
        }
    }
}
