//! Dates and times for `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

/// A date and time of day in UTC, for templates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    days: i64,
    second: u32,
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl Moment {
    /// The moment `seconds` after the Unix epoch.
    pub fn from_unix(seconds: i64) -> Self {
        Moment { days: seconds.div_euclid(86_400), second: seconds.rem_euclid(86_400) as u32 }
    }

    /// The current time.
    pub fn now() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self::from_unix(seconds as i64)
    }

    /// The text of Python's `strftime` in the C locale; the error is the first code that is not supported.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let mut text = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let code = chars.next();
            let (code, bare) = if code == Some('-') { (chars.next(), true) } else { (code, false) };
            let field = code.and_then(|code| self.field(code));
            let field = field.ok_or_else(|| format!("%{}", code.map(String::from).unwrap_or_default()))?;
            let number = field.trim_start_matches(['0', ' ']);
            text.push_str(if bare && !field.is_empty() && number.is_empty() {
                "0"
            } else if bare {
                number
            } else {
                &field
            });
        }
        Ok(text)
    }

    fn field(self, code: char) -> Option<String> {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (self.second / 3600, self.second / 60 % 60, self.second % 60);
        let weekday = (self.days + 4).rem_euclid(7) as usize;
        let parts = |codes: &str| self.format(codes).ok();
        Some(match code {
            'Y' => year.to_string(),
            'y' => format!("{:02}", year.rem_euclid(100)),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'j' => format!("{:03}", self.days - days_before(year, 1, 1) + 1),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => "000000".into(),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'A' => DAYS[weekday].into(),
            'a' => DAYS[weekday][..3].into(),
            'B' => MONTHS[month as usize - 1].into(),
            'b' | 'h' => MONTHS[month as usize - 1][..3].into(),
            'u' => (if weekday == 0 { 7 } else { weekday }).to_string(),
            'w' => weekday.to_string(),
            'F' => parts("%Y-%m-%d")?,
            'D' | 'x' => parts("%m/%d/%y")?,
            'T' | 'X' => parts("%H:%M:%S")?,
            'R' => parts("%H:%M")?,
            'c' => parts("%a %b %e %H:%M:%S %Y")?,
            'n' => "\n".into(),
            't' => "\t".into(),
            'z' | 'Z' => String::new(),
            '%' => "%".into(),
            _ => return None,
        })
    }

    /// Year, month and day of the Gregorian calendar.
    fn date(self) -> (i64, i64, i64) {
        // A first estimate that is never too late; the loop corrects it.
        let mut year = 1970 + self.days.div_euclid(366) - 1;
        while days_before(year + 1, 1, 1) <= self.days {
            year += 1;
        }
        let month = (1..=12).rfind(|&month| days_before(year, month, 1) <= self.days).unwrap_or(1);
        (year, month, self.days - days_before(year, month, 1) + 1)
    }
}

/// Days from the Unix epoch to a date.
fn days_before(year: i64, month: i64, day: i64) -> i64 {
    const BEFORE_MONTH: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let leaps_until = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let leap = year.rem_euclid(4) == 0 && (year.rem_euclid(100) != 0 || year.rem_euclid(400) == 0);
    let passed = (year - 1970) * 365 + leaps_until(year - 1) - leaps_until(1969);
    passed + BEFORE_MONTH[month as usize - 1] + i64::from(leap && month > 2) + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_are_written_as_python_writes_them() {
        let leap_day = Moment::from_unix(1_709_214_245); // 2024-02-29 13:44:05
        for (format, text) in [
            ("%d %b %Y", "29 Feb 2024"),
            ("%Y-%m-%d %H:%M:%S", "2024-02-29 13:44:05"),
            ("%A, %B %-d, %y %% %I:%M %p", "Thursday, February 29, 24 % 01:44 PM"),
            ("%a %j %-H %-I %-M %e %u", "Thu 060 13 1 44 29 4"),
            ("%F %T %D %R", "2024-02-29 13:44:05 02/29/24 13:44"),
        ] {
            assert_eq!(leap_day.format(format).unwrap(), text);
        }
        let start = Moment::from_unix(0);
        assert_eq!(start.format("%c|%-H|%-d|%I").unwrap(), "Thu Jan  1 00:00:00 1970|0|1|12");
        assert_eq!(Moment::from_unix(-1).format("%F %T").unwrap(), "1969-12-31 23:59:59");
        assert_eq!(Moment::from_unix(4_107_542_400).format("%F %a").unwrap(), "2100-03-01 Mon");
    }

    #[test]
    fn every_day_of_four_centuries_follows_the_one_before() {
        let mut before = Moment { days: -150_000, second: 0 }.date();
        for days in -149_999..150_000 {
            let date = Moment { days, second: 0 }.date();
            let (year, month, day) = before;
            let next = [(year, month, day + 1), (year, month + 1, 1), (year + 1, 1, 1)];
            assert!(next.contains(&date) && day <= 31, "{before:?} {date:?}");
            assert_eq!(days_before(date.0, date.1, date.2), days);
            before = date;
        }
    }

    #[test]
    fn an_unknown_code_is_named() {
        assert_eq!(Moment::from_unix(0).format("%Q"), Err("%Q".into()));
        assert_eq!(Moment::from_unix(0).format("100%"), Err("%".into()));
    }
}
